"""The three numbers that matter, live: TTFT p99 and inter-token p99 per pool, and utilization; never averaged together.

Owns sliding windows over the last minute, fed by the engine's observer: constant time per event, bounded memory,
quantiles within 1 % (see `sketch`). Utilization is the time the work would take at the device's measured peaks over
wall time; busy fraction (100 % with a single stream, so it says little) and mean running requests stand beside it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from minserve.observe.sketch import Window
from minserve.request import PHASES, Pool, RequestOutcome, StepRecord

_SLICE_S = 2.0


@dataclass(frozen=True, slots=True)
class PoolNumbers:
    """Seconds; None where nothing happened in the window. requests: first tokens in it.

    queue_p50: what those waited for their first step whose answers ended in it.
    """

    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    queue_p50: float | None
    requests: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Shares from 0 to 1, rates per second of wall time, over `window` seconds (fewer right after the start).

    running: mean number of running requests while the engine worked. waiting: the same of those that waited.
    phases: share of wall time per part of a step.
    """

    window: float
    pools: dict[Pool, PoolNumbers]
    utilization: float
    busy: float
    running: float
    waiting: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    steps_per_s: float
    preempted_per_s: float
    prefix_hit_share: float
    phases: dict[str, float]


@dataclass(slots=True)
class _Slice:
    index: int
    steps: int = 0
    ideal: float = 0.0
    plan: float = 0.0
    build: float = 0.0
    run: float = 0.0
    commit: float = 0.0
    deliver: float = 0.0
    running: float = 0.0  # requests times seconds
    waiting: float = 0.0
    prefill: int = 0
    decode: int = 0
    preempted: int = 0
    queries: int = 0
    hits: int = 0


class Numbers:
    def __init__(self, window: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._window = window
        self._clock = clock
        self._started = clock()
        self._slices: deque[_Slice] = deque()
        self._ttft = {pool: Window(window) for pool in Pool}
        self._itl = {pool: Window(window) for pool in Pool}
        self._queue = {pool: Window(window) for pool in Pool}

    def observe(self, record: StepRecord | RequestOutcome) -> None:
        now = self._clock()
        if isinstance(record, RequestOutcome):
            self._queue[record.pool].add(record.queue, now)
            return
        for pool, seconds in record.ttfts:
            self._ttft[pool].add(seconds, now)
        # Who got a token in this step and in the one before has the same gap, to the bit: most of them.
        for (pool, seconds), count in Counter(record.gaps).items():
            self._itl[pool].add(seconds, now, count)
        s = self._slice(now)
        s.steps += record.tokens > 0
        s.ideal += record.ideal
        s.plan += record.plan
        s.build += record.build
        s.run += record.run
        s.commit += record.commit
        s.deliver += record.deliver
        s.running += record.run * sum(record.running.values())
        s.waiting += record.run * sum(record.waiting.values())
        s.prefill += record.prefill_tokens
        s.decode += record.decode_tokens
        s.preempted += record.preempted
        s.queries += record.prefix_queries
        s.hits += record.prefix_hits

    def snapshot(self) -> Snapshot:
        now = self._clock()
        self._drop(now)
        wall = max(min(self._window, now - self._started), 1e-9)
        slices = self._slices
        run = sum(s.run for s in slices)
        parts = {name: sum(getattr(s, name) for s in slices) for name in PHASES}
        queries = sum(s.queries for s in slices)
        return Snapshot(
            window=wall,
            pools={pool: self._pool(pool, now) for pool in Pool},
            utilization=sum(s.ideal for s in slices) / wall,
            busy=min(1.0, run / wall),
            running=sum(s.running for s in slices) / run if run else 0.0,
            waiting=sum(s.waiting for s in slices) / run if run else 0.0,
            prefill_tokens_per_s=sum(s.prefill for s in slices) / wall,
            decode_tokens_per_s=sum(s.decode for s in slices) / wall,
            steps_per_s=sum(s.steps for s in slices) / wall,
            preempted_per_s=sum(s.preempted for s in slices) / wall,
            prefix_hit_share=sum(s.hits for s in slices) / queries if queries else 0.0,
            phases={name: seconds / wall for name, seconds in parts.items()},
        )

    def _pool(self, pool: Pool, now: float) -> PoolNumbers:
        ttft, itl = self._ttft[pool], self._itl[pool]
        return PoolNumbers(
            ttft_p50=ttft.quantile(0.5, now),
            ttft_p99=ttft.quantile(0.99, now),
            itl_p50=itl.quantile(0.5, now),
            itl_p99=itl.quantile(0.99, now),
            queue_p50=self._queue[pool].quantile(0.5, now),
            requests=ttft.count(now),
        )

    def _slice(self, now: float) -> _Slice:
        index = int(now / _SLICE_S)
        if not self._slices or self._slices[-1].index != index:
            self._drop(now)
            self._slices.append(_Slice(index))
        return self._slices[-1]

    def _drop(self, now: float) -> None:
        oldest = int((now - self._window) / _SLICE_S)
        while self._slices and self._slices[0].index <= oldest:
            self._slices.popleft()
