"""Quantiles of a stream of durations over the last minute, in constant time per event and bounded memory.

Owns the sketch: DDSketch (Masson, Rim, Lee, VLDB 2019). A value goes to the bucket ceil(log_g(value)), whose middle is
within 1 % of every value in it, so a quantile is within 1 % of the exact nearest-rank one. Slices of time are kept
apart; one that has left the window is dropped whole.
"""

from __future__ import annotations

import math
from collections import deque

_ERROR = 0.01
_GAMMA = (1 + _ERROR) / (1 - _ERROR)
_SCALE = 1 / math.log(_GAMMA)
_LEAST = 1e-6  # seconds; shorter ones count as this
_SLICES = 30


class Window:
    """Durations of the last `seconds`. Times are monotonic seconds, handed in, not decreasing."""

    def __init__(self, seconds: float = 60.0) -> None:
        self._grain = seconds / _SLICES
        self._slices: deque[tuple[int, dict[int, int]]] = deque()

    def add(self, value: float, now: float, count: int = 1) -> None:
        """`value` came `count` times."""
        index = int(now / self._grain)
        if not self._slices or self._slices[-1][0] != index:
            self._drop(index)
            self._slices.append((index, {}))
        buckets = self._slices[-1][1]
        bucket = math.ceil(math.log(value if value > _LEAST else _LEAST) * _SCALE)
        buckets[bucket] = buckets.get(bucket, 0) + count

    def quantile(self, q: float, now: float) -> float | None:
        """The q-quantile (0 < q <= 1) of the window, None when it is empty."""
        self._drop(int(now / self._grain))
        merged: dict[int, int] = {}
        for _, buckets in self._slices:
            for bucket, count in buckets.items():
                merged[bucket] = merged.get(bucket, 0) + count
        rank = math.ceil(q * sum(merged.values()))
        for bucket in sorted(merged):
            rank -= merged[bucket]
            if rank <= 0:
                return float(2 * _GAMMA**bucket / (_GAMMA + 1))
        return None

    def count(self, now: float) -> int:
        self._drop(int(now / self._grain))
        return sum(sum(buckets.values()) for _, buckets in self._slices)

    def _drop(self, index: int) -> None:
        while self._slices and self._slices[0][0] <= index - _SLICES:
            self._slices.popleft()
