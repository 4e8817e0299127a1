"""Counting within periods: how much of a cap is used now, and when it will be free again.

Owns the arithmetic of one counter. It must not know whose counter it is, nor clocks: times are Unix seconds handed in,
never decreasing.

A calendar period is one bucket. A rolling period is looked at through 60 buckets of a sixtieth each; an amount counts
until its bucket has left entirely, so no window of that length ever holds more than the cap (at most one bucket early
or late in the user's disfavour, never in their favour). Memory is at most 61 buckets a counter.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal, NamedTuple

import msgspec

Span = Literal["minute", "hour", "day", "month", "ever"]

SECONDS: dict[Span, float] = {"minute": 60.0, "hour": 3600.0, "day": 86400.0, "month": 30 * 86400.0}
_PARTS = 60


class Amount(msgspec.Struct, frozen=True, gc=False):
    """Calls, tokens, and money in billionths of the currency (integers: sums are exact). held: the part of the money
    that is only reserved."""

    requests: int = 0
    tokens: int = 0
    cost: int = 0
    held: int = 0

    def plus(self, other: Amount) -> Amount:
        return Amount(
            self.requests + other.requests, self.tokens + other.tokens, self.cost + other.cost, self.held + other.held
        )

    def minus(self, other: Amount) -> Amount:
        return Amount(
            self.requests - other.requests, self.tokens - other.tokens, self.cost - other.cost, self.held - other.held
        )

    @property
    def capped(self) -> tuple[int, int, int]:
        """What there are caps of."""
        return self.requests, self.tokens, self.cost


ZERO = Amount()


class Period(NamedTuple):
    """How time is cut. `ever` is one bucket that does not end: the life of a run."""

    span: Span
    rolling: bool = False

    @property
    def grain(self) -> float | None:
        """Seconds of a bucket, None where buckets are not equally long."""
        if self.span in ("month", "ever") and not self.rolling:
            return None
        return SECONDS[self.span] / _PARTS if self.rolling else SECONDS[self.span]

    def bucket(self, now: float) -> int:
        """The number of the bucket that `now` falls into."""
        grain = self.grain
        if grain is not None:
            return int(now / grain)
        if self.span == "ever":
            return 0
        date = datetime.fromtimestamp(now, UTC)
        return date.year * 12 + date.month - 1

    def oldest(self, now: float) -> int:
        """The first bucket that still counts at `now`."""
        return self.bucket(now) - (_PARTS if self.rolling else 0)

    def leaves(self, bucket: int) -> float | None:
        """When a bucket stops counting. None: never."""
        grain = self.grain
        if grain is not None:
            return (bucket + 1 + (_PARTS if self.rolling else 0)) * grain
        if self.span == "ever":
            return None
        year, month = divmod(bucket + 1, 12)
        return datetime(year, month + 1, 1, tzinfo=UTC).timestamp()

    def since(self, now: float) -> float:
        """The earliest time whose amounts still count at `now`."""
        grain = self.grain
        if grain is not None:
            return self.oldest(now) * grain
        if self.span == "ever":
            return 0.0
        year, month = divmod(self.bucket(now), 12)
        return datetime(year, month + 1, 1, tzinfo=UTC).timestamp()

    def __str__(self) -> str:
        if self.span == "ever":
            return "in all"
        return f"in any {self.span}" if self.rolling else f"per {self.span}"


class Counter:
    """What one scope has used of one period."""

    __slots__ = ("_until", "buckets", "period", "total")

    def __init__(self, period: Period) -> None:
        self.period = period
        self.buckets: dict[int, Amount] = {}  # oldest first
        self.total = ZERO
        self._until = 0.0  # until then no bucket leaves, so nothing has to be looked at

    def advance(self, now: float) -> None:
        """Forget the buckets that have left."""
        if now < self._until:
            return
        oldest = self.period.oldest(now)
        while self.buckets and (first := next(iter(self.buckets))) < oldest:
            self.total = self.total.minus(self.buckets.pop(first))
        first = next(iter(self.buckets), self.period.bucket(now))
        self._until = self.period.leaves(first) or float("inf")

    def add(self, now: float, amount: Amount) -> int:
        """Count `amount` at `now`; the bucket it went to, for a later `correct`."""
        bucket = self.period.bucket(now)
        self.restore(bucket, amount)
        return bucket

    def restore(self, bucket: int, amount: Amount) -> None:
        """Count `amount` in a bucket."""
        known = self.buckets.get(bucket)
        if known is None:
            self._until = min(self._until, self.period.leaves(bucket) or float("inf"))
            late = self.buckets and bucket < next(reversed(self.buckets))
            self.buckets[bucket] = amount
            if late:
                self.buckets = dict(sorted(self.buckets.items()))
        else:
            self.buckets[bucket] = known.plus(amount)
        self.total = self.total.plus(amount)

    def correct(self, bucket: int, difference: Amount) -> None:
        """Change what was counted in a bucket; one that has left needs no change."""
        if bucket in self.buckets:
            self.buckets[bucket] = self.buckets[bucket].plus(difference)
            self.total = self.total.plus(difference)

    def wait(self, now: float, surplus: Amount) -> float | None:
        """Seconds until at least `surplus` has left. None: not before the counter itself ends."""
        self.advance(now)
        gone = ZERO
        for bucket, amount in self.buckets.items():
            gone = gone.plus(amount)
            if all(g >= s for g, s in zip(gone.capped, surplus.capped, strict=True)):
                leaves = self.period.leaves(bucket)
                return None if leaves is None else max(0.0, leaves - now)
        return None

    def reset_in(self, now: float) -> float | None:
        """Seconds until everything counted now has left. 0 when nothing is counted."""
        self.advance(now)
        if not self.buckets:
            return 0.0
        leaves = self.period.leaves(next(reversed(self.buckets)))
        return None if leaves is None else max(0.0, leaves - now)
