"""Thousands of random workloads through scheduler, batches and a fake device; every invariant after every action.

Tiny pools, both queues, groups, shared prefixes, priorities, drafts, aborts in every state, failed steps. Each request
must get exactly the tokens it gets alone: preemption, chunking, prefix hits and forks change nothing.
SIM_CASES sets how many workloads run; a failure names the case to run again.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from minserve.policy import order
from minserve.policy.limits import Limits, PoolLimits
from minserve.policy.schedule import plan_step
from minserve.request import FinishReason, Pool, SamplingParams, StepPlan, Submission, View
from tests.driver import Driver
from tests.fake_program import VOCAB

CASES = int(os.environ.get("SIM_CASES", "200"))
PER_TEST = 50


class Simulation(Driver):
    def __init__(self, case: int) -> None:
        self.random = random.Random(case)
        self.limits = random_limits(self.random)
        super().__init__(self.limits, caching=self.random.random() < 0.85, plan=self.plan_with_drafts)
        self.drafts = self.random.random() < 0.3
        self.submissions: dict[str, Submission] = {}
        self.seen: tuple[Sequence[View], Sequence[View]] = (), ()
        self.exhausted: set[str] = set()
        self.empty_plans = 0

    def submit_one(self, number: int) -> None:
        submission = random_submission(self.random, number, self.limits)
        for name in self.put(submission, seed=self.random.getrandbits(40)):
            self.submissions[name] = submission

    def abort_one(self) -> None:
        if self.scheduler.requests:
            victim = self.random.choice(sorted(self.scheduler.requests))
            self.finish(victim, self.random.choice([FinishReason.ABORT, FinishReason.STOP]))

    def running(self, plan: StepPlan) -> None:
        if self.random.random() < 0.02:  # an abort while the step runs: nothing is handed out before it has ended
            self.abort_one()

    def plan_with_drafts(
        self, step: int, running: Sequence[View], waiting: Sequence[View], free: int, limits: Limits
    ) -> StepPlan:
        """The policy, told of drafts: some right, some wrong."""
        if self.drafts:
            running = [view._replace(draft=self.draft(view)) for view in running]
        self.seen = running, waiting
        return plan_step(step, running, waiting, free, limits)

    def draft(self, view: View) -> tuple[int, ...]:
        if self.submissions[view.id].params.penalized:  # the device counts what it samples, rejected drafts too
            return ()
        right = self.expected[view.id].tokens[len(self.tokens(view.id)) :][: self.random.randint(0, 4)]
        return tuple(t if self.random.random() < 0.8 else self.random.randrange(VOCAB) for t in right)

    # -- what must hold

    def planned(self, plan: StepPlan) -> None:
        running, waiting = self.seen
        views = {view.id: view for view in (*running, *waiting)}
        limits, seats = self.limits, Counter(r.pool for r in self.scheduler.requests.values() if r.seat >= 0)
        decoding = {view.id for view in running if view.known - view.computed == 1}
        prompt_tokens = sum(c.count - len(c.draft) for c in plan.chunks if c.request_id not in decoding)
        assert plan.tokens <= limits.max_step_tokens
        resting = {i for i in decoding - {c.request_id for c in plan.chunks} if views[i].pool is Pool.BULK}
        assert prompt_tokens <= (
            limits.chunk_tokens + len(resting) * limits.decode_worth if decoding else limits.max_step_tokens
        )
        assert sum(c.scored + c.samples + len(c.forks) for c in plan.chunks) <= limits.max_rows
        assert seats.total() <= limits.max_seqs
        assert all(seats[pool] <= limits.pools[pool].max_seqs for pool in Pool)
        for chunk in plan.chunks:
            view, end = views[chunk.request_id], chunk.start + chunk.count - len(chunk.draft)
            assert view.computed == chunk.start < end <= view.known
            assert bool(chunk.samples) == (end == view.known < view.limit)
        waiting_now = sum(self.scheduler.counts().waiting.values()) - len(plan.preempted)
        waiting_now -= len(set(plan.exhausted) - {view.id for view in running})
        assert sum(plan.waits.values()) == waiting_now, "everybody who waits has a reason"
        self.exhausted.update(plan.exhausted)
        self.empty_plans = 0 if plan.chunks or plan.exhausted else self.empty_plans + 1
        assert self.empty_plans <= 2, "nothing advances"

    def check_life(self, name: str) -> None:
        """One request as its client saw it."""
        params, expected, events, last = (
            self.submissions[name].params,
            self.expected[name],
            self.events[name],
            self.end(name),
        )
        tokens, prompt = self.tokens(name), self.submissions[name].prompt
        assert tokens == expected.tokens[: len(tokens)], "other tokens than alone"
        if params.logprobs is not None:
            assert [event.logprob for event in events if event.token_id >= 0] == expected.logprobs[: len(tokens)]
        scored = [list(event.prompt_logprobs) for event in events if event.prompt_logprobs]
        if params.prompt_logprobs is not None and len(prompt) > 1 and tokens:
            assert scored == [expected.prompt_logprobs], "prompt log probabilities are delivered once"
        assert last.usage is not None
        assert (last.usage.prompt, last.usage.completion) == (len(prompt), len(tokens))
        assert 0 <= last.usage.cached <= last.usage.prompt
        if last.error is not None and last.error.code == "no_valid_token":
            assert len(tokens) == len(expected.tokens)
        elif last.finish is FinishReason.LENGTH and name not in self.exhausted:
            assert len(tokens) == params.max_tokens
        elif last.finish is FinishReason.STOP and last.token_id >= 0:
            assert len(tokens) == len(expected.tokens)
            assert last.token_id in params.stop_token_ids


def random_limits(rng: random.Random) -> Limits:
    block_size = rng.choice([1, 2, 3, 4, 4, 8])
    seats = rng.randint(1, 6)
    step_tokens = seats + rng.choice([0, 1, 4, 16, 40])
    shares = [rng.choice([0.0, 0.2, 0.5, 0.8, 1.0]) for _ in range(4)]
    return Limits(
        block_size=block_size,
        num_blocks=rng.randint(2, rng.choice([60, 60, 150]) // block_size + 3),
        max_seqs=seats,
        max_step_tokens=step_tokens,
        chunk_tokens=rng.randint(1, step_tokens),
        max_rows=seats + rng.choice([0, 0, 1, 5, 50]),
        watermark_blocks=rng.randint(0, 3),
        decode_worth=rng.choice([1.0, 1.0, 1.7, 3.0]),
        pools={
            Pool.INTERACTIVE: PoolLimits(rng.randint(max(1, seats - 2), seats), shares[0], shares[1]),
            Pool.BULK: PoolLimits(rng.randint(max(1, seats - 2), seats), shares[2], shares[3]),
        },
    )


def random_submission(rng: random.Random, number: int, limits: Limits) -> Submission:
    system = [t % VOCAB for t in range(rng.choice([0, 0, 4, 9, 20, 40]))]
    own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
    prompt = tuple((system + own)[: max(1, limits.capacity - 1)])
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
        "allowed_token_ids": frozenset(rng.sample(range(VOCAB), 2)) if rng.random() < 0.05 else None,
    }
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
    count, submitted = rng.randint(1, 10), 0
    pressing = rng.random() < 0.5  # all at once, or one after the other
    aborts = rng.choice([0.0, 0.0, 0.05, 0.2])
    while submitted < count or sim.scheduler.has_work:
        while submitted < count and (pressing or rng.random() < 0.3 or not sim.scheduler.has_work):
            sim.submit_one(submitted)
            submitted += 1
        if rng.random() < aborts:
            sim.abort_one()
        if sim.scheduler.has_work:
            sim.step(fail=rng.random() < 0.01)
        work = sum(len(s.prompt) + s.params.max_tokens for s in sim.submissions.values())
        assert len(sim.plans) <= 200 + 20 * work, "somebody waits for ever"
    for name in sim.submissions:
        sim.check_life(name)
    sim.check_idle()


@pytest.mark.parametrize("first", range(0, CASES, PER_TEST))
def test_every_request_gets_what_it_gets_alone_and_nothing_is_lost(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # bug: 18
    if first % (2 * PER_TEST):  # so that what takes long in life happens in short workloads, too
        monkeypatch.setattr(order, "MAX_SKIPS_BELOW", 3)
    for case in range(first, min(first + PER_TEST, CASES)):
        try:
            run_case(case)
        except Exception as error:
            raise AssertionError(f"case {case}") from error
