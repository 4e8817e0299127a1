"""How long a call would wait that comes now: what admission, Retry-After and degradation ask.

Owns the forecast, which learns from every step and end, and what it said last. It must not know streams or HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from minserve.policy.admission import Load
from minserve.policy.forecast import Forecast
from minserve.request import Pool, RequestOutcome
from minserve.scheduler import Scheduler
from minserve.step import Step


class QueueTimes:
    def __init__(self, scheduler: Scheduler, max_queue: Mapping[Pool, int]) -> None:
        self._scheduler = scheduler
        self._max_queue = max_queue
        self._forecast = Forecast(scheduler.limits.block_size)
        self._steps = 0
        self._said: dict[Pool, tuple[tuple[int, int], float]] = {}

    def finished(self, step: Step, now: float) -> None:
        """A step has been committed and delivered."""
        self._steps += 1
        self._forecast.step(step.decode_tokens, step.prefill_tokens, now - step.started)

    def ended(self, outcome: RequestOutcome) -> None:
        if outcome.ttft is not None:
            self._forecast.end(outcome.finish, outcome.usage)

    def wait(self, pool: Pool) -> float:
        """Seconds until a call of this pool that comes now would start."""
        requests = self._scheduler.requests
        moment = self._steps, len(requests)
        said = self._said.get(pool)
        if said is None or said[0] != moment:  # a storm of refusals between two steps costs one look at the queue
            said = self._said[pool] = moment, self._forecast.wait(pool, requests.values(), self._scheduler.limits)
        return said[1]

    def without(self, groups: Set[str]) -> dict[Pool, float]:
        """The same, once these submissions have left."""
        left = [request for request in self._scheduler.requests.values() if request.group not in groups]
        return {pool: self._forecast.wait(pool, left, self._scheduler.limits) for pool in Pool}

    def load(self, pool: Pool) -> Load:
        """What the pool has before it; the wait only where it matters, behind a full queue."""
        load = Load(self._scheduler.counts().waiting[pool], self._max_queue[pool])
        return replace(load, wait=self.wait(pool)) if load.full else load
