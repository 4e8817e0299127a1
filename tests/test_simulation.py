"""Thousands of random workloads through scheduler, batches and a fake device; every invariant after every action.

Tiny pools, both queues, groups, shared prefixes, priorities, drafts, aborts in every state, failed steps. Each request
must get exactly the tokens it gets alone: preemption, chunking, prefix hits and forks change nothing.
MINSERVE_SIM_CASES sets how many workloads run (default 600); a failure names the case to run again.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from minserve.batch import StepResult
from minserve.batch_build import build_batch
from minserve.policy.schedule import Limits, PoolLimits, plan_step
from minserve.request import (
    FinishReason,
    Pool,
    RequestError,
    SamplingParams,
    StepPlan,
    Submission,
    TokenEvent,
    View,
)
from minserve.runner import Runner
from minserve.scheduler import Scheduler
from tests.fake_program import VOCAB, Alone, FakeProgram, alone

CASES = int(os.environ.get("MINSERVE_SIM_CASES", "600"))
PER_TEST = 50


@dataclass
class Life:
    """One request as its client sees it."""

    submission: Submission
    expected: Alone
    events: list[TokenEvent] = field(default_factory=list)
    starved_at: int = 0  # blocks were short when it ended

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if event.token_id >= 0]

    @property
    def finish(self) -> FinishReason | None:
        return self.events[-1].finish if self.events else None


class Simulation:
    def __init__(self, case: int) -> None:
        self.random = random.Random(case)
        self.limits = random_limits(self.random)
        self.program = FakeProgram(self.limits.num_blocks, self.limits.block_size)
        self.runner = Runner(self.program, None, None, 1.0)  # type: ignore[arg-type]  # only `run` is used
        self.drafts = self.random.random() < 0.3
        self.caching = self.random.random() < 0.85
        self.scheduler = Scheduler(
            self.limits, weights_id=b"w", prefix_caching=self.caching, plan=self.plan_with_drafts
        )
        self.lives: dict[str, Life] = {}
        self.seen: tuple[Sequence[View], Sequence[View], int] = ((), (), 0)
        self.exhausted: set[str] = set()
        self.idle_plans = 0
        self.steps = 0

    # -- the world outside

    def submit(self, number: int) -> None:
        submission = random_submission(self.random, number, self.limits)
        seed = self.random.getrandbits(40)
        for request in self.scheduler.submit(submission, seed, now=float(number)):
            expected = alone(submission.prompt, submission.params, seed, request.choice)
            self.lives[request.id] = Life(submission, expected)
        self.scheduler.check()

    def abort(self, request_id: str, reason: FinishReason) -> None:
        event = self.scheduler.finish(request_id, reason)
        assert event is not None
        self.take([event])
        assert self.scheduler.finish(request_id, reason) is None
        self.scheduler.check()

    # -- one step

    def step(self) -> None:
        plan = self.scheduler.plan()
        self.scheduler.check()
        self.check_plan(plan)
        self.exhausted.update(plan.exhausted)
        batch = build_batch(
            plan,
            self.scheduler.requests,
            block_size=self.limits.block_size,
            vocab_size=VOCAB,
            copies=self.scheduler.copies(),
        )
        if self.random.random() < 0.02:  # an abort while the step runs: nothing is handed out before it has ended
            self.abort_one()
        self.program.fail_next = self.random.random() < 0.01
        try:
            result = self.runner.run(plan, batch) if plan.chunks else StepResult(())
        except RuntimeError:
            self.take(self.scheduler.fail(plan, RequestError("failed", status=500, code="engine_error")))
        else:
            self.take(self.scheduler.commit(plan, result))
        self.scheduler.check()
        self.steps += 1

    def plan_with_drafts(
        self, step: int, running: Sequence[View], waiting: Sequence[View], free: int, limits: Limits
    ) -> StepPlan:
        """The policy, told of drafts: some right, some wrong."""
        if self.drafts:
            running = [view._replace(draft=self.draft(view)) for view in running]
        self.seen = running, waiting, free
        return plan_step(step, running, waiting, free, limits)

    def draft(self, view: View) -> tuple[int, ...]:
        life = self.lives[view.id]
        if life.submission.params.penalized:  # the device counts what it samples, rejected drafts too
            return ()
        right = life.expected.tokens[len(life.tokens) :][: self.random.randint(0, 4)]
        return tuple(t if self.random.random() < 0.8 else self.random.randrange(VOCAB) for t in right)

    def abort_one(self) -> None:
        if self.scheduler.requests:
            victim = self.random.choice(sorted(self.scheduler.requests))
            self.abort(victim, self.random.choice([FinishReason.ABORT, FinishReason.STOP]))

    # -- what must hold

    def check_plan(self, plan: StepPlan) -> None:
        running, waiting, _ = self.seen
        views = {view.id: view for view in (*running, *waiting)}
        limits, seats = self.limits, Counter(r.pool for r in self.scheduler.requests.values() if r.seat >= 0)
        decoding = {view.id for view in running if view.known - view.computed == 1}
        prompt_tokens = sum(c.count - len(c.draft) for c in plan.chunks if c.request_id not in decoding)
        assert plan.tokens <= limits.max_step_tokens
        assert prompt_tokens <= (limits.chunk_tokens if decoding else limits.max_step_tokens)
        assert sum(c.scored + c.samples + len(c.forks) for c in plan.chunks) <= limits.max_rows
        assert seats.total() <= limits.max_seqs
        assert all(seats[pool] <= limits.pools[pool].max_seqs for pool in Pool)
        for chunk in plan.chunks:
            view = views[chunk.request_id]
            assert chunk.start == view.computed
            assert chunk.count >= 1
            reaches_end = chunk.start + chunk.count - len(chunk.draft) == view.known
            assert bool(chunk.samples) == (reaches_end and view.known < view.limit)
        if not plan.chunks and not plan.exhausted:
            self.idle_plans += 1
            assert self.idle_plans <= 2, "nothing advances"
        else:
            self.idle_plans = 0

    def take(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            life = self.lives[event.request_id]
            assert life.finish is None, "an event after the end"
            assert event.index == len(life.tokens)
            life.events.append(event)

    def check_life(self, request_id: str, life: Life) -> None:
        params, expected, last = life.submission.params, life.expected, life.events[-1]
        assert last.finish is not None, f"{request_id} never ended"
        assert all(event.finish is None for event in life.events[:-1])
        assert life.tokens == expected.tokens[: len(life.tokens)], f"{request_id}: other tokens than alone"
        if params.logprobs is not None:
            got = [event.logprob for event in life.events if event.token_id >= 0]
            assert got == expected.logprobs[: len(got)]
        scored = [list(event.prompt_logprobs) for event in life.events if event.prompt_logprobs]
        if params.prompt_logprobs is not None and len(life.submission.prompt) > 1 and life.tokens:
            assert scored == [expected.prompt_logprobs], "prompt log probabilities are delivered once"
        assert last.usage is not None
        assert last.usage.prompt == len(life.submission.prompt)
        assert last.usage.completion == len(life.tokens)
        assert 0 <= last.usage.cached <= last.usage.prompt
        if last.error is not None and last.error.code == "no_valid_token":
            assert len(life.tokens) == len(expected.tokens)
        elif last.finish is FinishReason.LENGTH and request_id not in self.exhausted:
            assert len(life.tokens) == params.max_tokens
        elif last.finish is FinishReason.STOP and last.token_id >= 0:
            assert len(life.tokens) == len(expected.tokens)
            assert last.token_id in params.stop_token_ids

    def check_idle(self) -> None:
        """Nothing is left of anybody: free + cached blocks are all there are."""
        counts = self.scheduler.counts()
        assert not self.scheduler.has_work
        assert counts.blocks_free + counts.blocks_cached == counts.blocks_total == self.limits.num_blocks
        assert not any(counts.running.values())
        assert not any(counts.waiting.values())
        assert self.scheduler.copies() == ()


def random_limits(rng: random.Random) -> Limits:
    block_size = rng.choice([1, 2, 3, 4, 4, 8])
    seats = rng.randint(1, 6)
    step_tokens = seats + rng.choice([0, 1, 4, 16, 40])
    shares = [rng.choice([0.0, 0.2, 0.5, 0.8, 1.0]) for _ in range(4)]
    return Limits(
        block_size=block_size,
        num_blocks=rng.randint(2, 60 // block_size + 3),
        max_seqs=seats,
        max_step_tokens=step_tokens,
        chunk_tokens=rng.randint(1, step_tokens),
        max_rows=seats + rng.choice([0, 0, 1, 5, 50]),
        watermark_blocks=rng.randint(0, 3),
        pools={
            Pool.INTERACTIVE: PoolLimits(rng.randint(max(1, seats - 2), seats), shares[0], shares[1]),
            Pool.BULK: PoolLimits(rng.randint(max(1, seats - 2), seats), shares[2], shares[3]),
        },
    )


def random_submission(rng: random.Random, number: int, limits: Limits) -> Submission:
    longest = limits.capacity - 1
    system = [t % VOCAB for t in range(rng.choice([0, 0, 4, 9, 20]))]
    own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
    prompt = tuple((system + own)[: max(1, longest)])
    scored = rng.random() < 0.15
    params: dict[str, Any] = {
        "max_tokens": rng.choice([1, 2, 5, 10, 25]) if not scored else rng.choice([0, 0, 3, 12]),
        "temperature": rng.choice([0.0, 1.0]),
        "stop_token_ids": frozenset(rng.sample(range(VOCAB), rng.choice([0, 1, 1, 3]))),
        "min_tokens": rng.choice([0, 0, 0, 2, 6]),
        "logprobs": rng.choice([None, 0]),
        "prompt_logprobs": 0 if scored else None,
        "presence_penalty": rng.choice([0.0, 0.0, 0.0, 0.5]),
        "banned_token_ids": frozenset(rng.sample(range(VOCAB), rng.choice([0, 0, 0, 2]))),
    }
    if rng.random() < 0.05:
        params["allowed_token_ids"] = frozenset(rng.sample(range(VOCAB), 2))
    return Submission(
        id=f"r{number}",
        prompt=prompt,
        params=SamplingParams(**params),
        n=rng.choice([1, 1, 1, 2, 3]),
        pool=rng.choice([Pool.INTERACTIVE, Pool.INTERACTIVE, Pool.BULK]),
        priority=rng.choice([0, 0, 0, -1, 1]),
        salt=rng.choice([b"", b"", b"a"]),
    )


def run_case(case: int) -> None:
    sim = Simulation(case)
    rng = sim.random
    count = rng.randint(1, 9)
    pressing = rng.random() < 0.5  # all at once, or one after the other
    aborts = rng.choice([0.0, 0.0, 0.05, 0.2])
    submitted = 0
    work = 0
    while submitted < count or sim.scheduler.has_work:
        while submitted < count and (pressing or rng.random() < 0.3 or not sim.scheduler.has_work):
            sim.submit(submitted)
            submitted += 1
        work = sum(len(life.submission.prompt) + life.submission.params.max_tokens for life in sim.lives.values())
        if rng.random() < aborts:
            sim.abort_one()
        if sim.scheduler.has_work:
            sim.step()
        assert sim.steps <= 200 + 20 * work, "somebody waits for ever"
    for request_id, life in sim.lives.items():
        sim.check_life(request_id, life)
    sim.check_idle()


@pytest.mark.parametrize("first", range(0, CASES, PER_TEST))
def test_every_request_gets_what_it_gets_alone_and_nothing_is_lost(first: int) -> None:  # bug: 18
    for case in range(first, min(first + PER_TEST, CASES)):
        try:
            run_case(case)
        except Exception as error:
            raise AssertionError(f"case {case}") from error
