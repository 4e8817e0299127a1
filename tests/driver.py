"""Drives a Scheduler step by step against the fake program, as an engine would, with every invariant checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from minserve.batch import StepResult
from minserve.batch_build import build_batch
from minserve.policy.limits import Limits
from minserve.policy.schedule import PlanFunction, plan_step
from minserve.request import FinishReason, Pool, RequestError, SamplingParams, StepPlan, Submission, TokenEvent
from minserve.runner import Runner
from minserve.scheduler import Scheduler
from tests.fake_program import VOCAB, Alone, FakeProgram, alone
from tests.policy.plans import make_limits

FAILED = RequestError("failed", status=500, code="engine_error")


def prompt(length: int, start: int = 0) -> list[int]:
    """No two starts below VOCAB have a block in common."""
    return [(start + 5 * i * (start + 1)) % VOCAB for i in range(length)]


def driver(**limits: Any) -> Driver:
    return Driver(make_limits(**limits))


class Driver:
    """plans: all so far. events: per request id, in order. expected: what each request would get alone."""

    def __init__(self, limits: Limits, *, caching: bool = True, plan: PlanFunction = plan_step) -> None:
        self.scheduler = Scheduler(limits, weights_id=b"weights", prefix_caching=caching, plan=plan)
        self.program = FakeProgram(limits.num_blocks, limits.block_size)
        self.runner = Runner(self.program, None, None, 1.0)  # type: ignore[arg-type]  # only `run` is used
        self.plans: list[StepPlan] = []
        self.events: dict[str, list[TokenEvent]] = {}
        self.expected: dict[str, Alone] = {}

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        n: int = 1,
        pool: Pool = Pool.INTERACTIVE,
        priority: int = 0,
        salt: bytes = b"",
        seed: int = 7,
        **params: Any,
    ) -> list[str]:
        sampling = SamplingParams(**({"max_tokens": 5, "temperature": 0.0} | params))
        submission = Submission(name, tuple(prompt), sampling, n=n, pool=pool, priority=priority, salt=salt)
        return self.put(submission, seed)

    def put(self, submission: Submission, seed: int) -> list[str]:
        requests = self.scheduler.submit(submission, seed, now=float(len(self.events)))
        for request in requests:
            self.events[request.id] = []
            self.expected[request.id] = alone(submission.prompt, submission.params, seed, request.choice)
        self.scheduler.check()
        return [request.id for request in requests]

    def step(self, *, fail: bool = False) -> StepPlan:
        """Plan, build, run, commit. fail: the device raises."""
        plan = self.scheduler.plan()
        self.plans.append(plan)
        self.scheduler.check()
        self.planned(plan)
        batch = build_batch(
            plan,
            self.scheduler.requests,
            block_size=self.scheduler.limits.block_size,
            vocab_size=VOCAB,
            copies=self.scheduler.copies(),
        )
        self.running(plan)
        self.program.fail_next = fail
        try:
            result = self.runner.run(plan, batch) if plan.chunks else StepResult(())
        except RuntimeError:
            self.take(self.scheduler.fail(plan, FAILED))
        else:
            self.take(self.scheduler.commit(plan, result))
        self.program.fail_next = False
        self.scheduler.check()
        return plan

    def planned(self, plan: StepPlan) -> None:
        """A hook between plan and build."""

    def running(self, plan: StepPlan) -> None:
        """A hook while the step is under way."""

    def run(self, most: int = 2000) -> None:
        """Until nothing is left."""
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {most} steps")

    def finish(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> TokenEvent:
        event = self.scheduler.finish(request_id, reason)
        assert event is not None
        self.take([event])
        assert self.scheduler.finish(request_id, reason) is None, "a second end is none"
        self.scheduler.check()
        return event

    def take(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            before = self.events[event.request_id]
            assert not before or before[-1].finish is None, "an event after the end"
            assert event.index == len(self.tokens(event.request_id))
            before.append(event)

    def tokens(self, request_id: str) -> list[int]:
        return [event.token_id for event in self.events[request_id] if event.token_id >= 0]

    def end(self, request_id: str) -> TokenEvent:
        """The last event, which must be an end."""
        event = self.events[request_id][-1]
        assert event.finish is not None
        return event

    def chunks(self, request_id: str) -> list[tuple[int, int]]:
        """(start, count) of every chunk of a request so far."""
        return [(c.start, c.count) for plan in self.plans for c in plan.chunks if c.request_id == request_id]

    def computed(self, *names: str) -> int:
        """Tokens computed so far, of these requests or of all."""
        chunks = (chunk for plan in self.plans for chunk in plan.chunks)
        return sum(chunk.count for chunk in chunks if not names or chunk.request_id in names)

    def check_idle(self) -> None:
        """Nothing is left of anybody: free + cached blocks are all there are."""
        counts = self.scheduler.counts()
        assert not self.scheduler.has_work
        assert counts.blocks_free + counts.blocks_cached == counts.blocks_total
        assert not any((*counts.running.values(), *counts.waiting.values()))
        assert self.scheduler.copies() == ()
