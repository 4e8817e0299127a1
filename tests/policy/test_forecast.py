"""How long a call would wait, measured against a machine that keeps its own time: right within a factor of two."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from minserve.batch import ChunkResult, StepResult
from minserve.policy.forecast import Forecast
from minserve.policy.limits import Limits
from minserve.request import FinishReason, Pool, Request, SamplingParams, StepPlan, Submission, Usage
from minserve.scheduler import Scheduler
from tests.policy.plans import make_limits

STOP = 7


@dataclass
class Machine:
    """A step takes `base + per_token * prompt tokens` seconds of its own clock, plus 20 microseconds per sequence."""

    limits: Limits
    base: float = 0.02
    per_token: float = 0.0005
    now: float = 0.0
    started: dict[str, float] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)  # after so many tokens a request stops by itself
    count: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits, weights_id=b"w", prefix_caching=False)
        self.forecast = Forecast(self.limits.block_size)

    def submit(self, prompt: int, most: int, length: int | None = None, pool: Pool = Pool.INTERACTIVE) -> str:
        name = str(self.count)
        self.count += 1
        params = SamplingParams(max_tokens=most, stop_token_ids=frozenset([STOP]))
        submission = Submission(name, tuple(range(prompt)), params, pool=pool)
        self.scheduler.submit(submission, 0, self.now)
        self.lengths[f"{name}#0"] = most + 1 if length is None else length
        return f"{name}#0"

    def wait(self, pool: Pool = Pool.INTERACTIVE) -> float:
        return self.forecast.wait(pool, self.scheduler.requests.values(), self.scheduler.limits)

    def waiting(self, pool: Pool = Pool.INTERACTIVE) -> int:
        return self.scheduler.counts().waiting[pool]

    def step(self) -> None:
        plan = self.scheduler.plan()
        for name in plan.admitted:
            self.started.setdefault(name, self.now)
        decodes = sum(1 for chunk in plan.chunks if chunk.count == 1 and chunk.samples)
        prompts = plan.tokens - decodes
        seconds = self.base + self.per_token * prompts + 20e-6 * len(plan.chunks)
        self.now += seconds
        for event in self.scheduler.commit(plan, self._result(plan)):
            if event.finish is not None and event.usage is not None:
                self.forecast.end(event.finish, event.usage)
        self.forecast.step(decodes, prompts, seconds)

    def _result(self, plan: StepPlan) -> StepResult:
        def tokens(request: Request) -> tuple[int, ...]:
            return (STOP if request.output_len + 1 >= self.lengths[request.id] else 1,)

        requests = self.scheduler.requests
        return StepResult(tuple(ChunkResult(tokens(requests[c.request_id]) if c.samples else ()) for c in plan.chunks))

    def until_started(self, name: str) -> float:
        """Seconds from now until a request starts."""
        before = self.now
        while name not in self.started:
            self.step()
        return self.started[name] - before


def right(said: float, true: float) -> bool:
    return true / 2 <= said <= true * 2


LIMITS = make_limits(block_size=16, max_seqs=8, max_step_tokens=256, chunk_tokens=64)


def test_nothing_measured_or_a_free_seat_is_no_wait() -> None:
    machine = Machine(LIMITS)
    machine.submit(50, 100)
    assert machine.wait() == 0.0
    for _ in range(30):
        machine.step()
    assert machine.wait() == 0.0


@pytest.mark.parametrize("queued", [0, 1, 7, 8, 30, 200])
@pytest.mark.parametrize("done", [5, 60, 95])
def test_the_backlog_of_equal_requests_that_began_together(queued: int, done: int) -> None:
    machine = Machine(LIMITS)
    for _ in range(8 + queued):
        machine.submit(20, 100)
    for _ in range(done):
        machine.step()
    said = machine.wait()
    assert right(said, machine.until_started(machine.submit(20, 100)))


@pytest.mark.parametrize(("prompt", "most"), [(1000, 2), (600, 30), (30, 300)])
def test_prompts_that_take_longer_than_their_answers_count(prompt: int, most: int) -> None:
    machine = Machine(LIMITS, base=0.01, per_token=0.001)
    for _ in range(40):
        machine.submit(prompt, most)
    for _ in range(60):
        machine.step()
    said = machine.wait()
    assert right(said, machine.until_started(machine.submit(prompt, most)))


def test_blocks_can_be_scarcer_than_seats() -> None:
    limits = make_limits(block_size=16, num_blocks=40, max_seqs=32, max_step_tokens=256, chunk_tokens=64)
    machine = Machine(limits)
    for _ in range(60):
        machine.submit(200, 100)
    for _ in range(100):
        machine.step()
    said = machine.wait()
    assert right(said, machine.until_started(machine.submit(200, 100)))


@pytest.mark.parametrize("pool", list(Pool))
def test_each_pool_has_its_own_backlog(pool: Pool) -> None:
    machine = Machine(LIMITS)
    for _ in range(40):
        machine.submit(20, 100)
        machine.submit(20, 100, pool=Pool.BULK)
    for _ in range(120):
        machine.step()
    other = Pool.BULK if pool is Pool.INTERACTIVE else Pool.INTERACTIVE
    said = machine.wait(pool)
    late = machine.submit(20, 100, pool=pool)
    before = machine.now
    while late not in machine.started:
        while machine.waiting(other) < 20:
            machine.submit(20, 100, pool=other)
        machine.step()
    assert right(said, machine.started[late] - before)


def lengths(rng: random.Random, kind: str) -> tuple[int, int, int | None]:
    """(prompt, max_tokens, where it stops) of a call."""
    prompt = rng.randint(10, 300)
    if kind == "limit":
        return prompt, rng.randint(20, 200), None
    if kind == "geometric":
        return prompt, 400, 1 + min(399, int(rng.expovariate(1 / 80)))
    return prompt, 400, rng.choice([60, 80, 100])


@pytest.mark.parametrize(
    ("kind", "max_queue"),  # where answers end by themselves nobody knows when the next few will
    [("limit", 4), ("limit", 64), ("steady", 16), ("steady", 64), ("geometric", 16), ("geometric", 64)],
)
def test_refusals_under_three_times_what_can_be_served_say_when_there_is_room(kind: str, max_queue: int) -> None:
    # bug: 59
    rng = random.Random(max_queue)
    machine = Machine(LIMITS)
    refused: list[tuple[float, float, int]] = []  # when, what was said, who comes next
    arrival = 0.0
    while machine.now < 60:
        while arrival <= machine.now:
            arrival += rng.expovariate(12)
            if machine.waiting() >= max_queue:
                refused.append((machine.now, machine.wait(), machine.count))
            else:
                machine.submit(*lengths(rng, kind))
        machine.step()
    served = machine.count - machine.waiting()
    assert machine.count + len(refused) > 2.5 * served
    judged = [
        right(said, machine.started[f"{following}#0"] - when)
        for when, said, following in refused
        if f"{following}#0" in machine.started
    ]
    assert len(judged) >= 200
    assert sum(judged) >= 0.9 * len(judged), Counter(judged)


def test_what_the_prefix_index_holds_is_not_waited_for() -> None:
    machine = Machine(LIMITS, per_token=0.01)
    for _ in range(30):
        machine.submit(400, 2)
    for _ in range(20):
        machine.step()
    cold = machine.wait()
    for _ in range(100):
        machine.forecast.end(FinishReason.LENGTH, Usage(400, 390, 2))
    assert machine.wait() < cold / 5
