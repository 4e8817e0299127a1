"""The cost model: what a user costs in a month, and above all what the dearest ones cost.

Averages hide the tail that decides: a few users cause most of the spend, and one cap decides how much the worst of them
can cost. Owns the arithmetic; where usage comes from (the ledger or a scenario) is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minserve.config import LimitConfig
from minserve.economics.prices import Prices
from minserve.economics.settlement import rank
from minserve.economics.windows import SECONDS, Period

DAYS = 30.0  # of a month


@dataclass(frozen=True, slots=True)
class Spread:
    """Cost per user and month, in the currency. top_share: part of all cost that the dearest 1 % of users cause."""

    users: int
    mean: float
    p50: float
    p95: float
    p99: float
    most: float
    top_share: float

    @classmethod
    def of(cls, costs: Sequence[float]) -> Spread:
        """costs: one per user, at least one, in any order. The dearest 1 % is at least one user."""
        ordered = sorted(costs)
        total = math.fsum(ordered)
        top = math.fsum(ordered[-max(1, len(ordered) // 100) :])
        return cls(
            users=len(ordered),
            mean=total / len(ordered),
            p50=rank(ordered, 0.5),
            p95=rank(ordered, 0.95),
            p99=rank(ordered, 0.99),
            most=ordered[-1],
            top_share=top / total if total else 0.0,
        )


@dataclass(frozen=True, slots=True)
class Margin:
    """What remains of a price per user and month. losing: share of users that cost more than they pay."""

    price: float
    per_user: float
    share: float
    losing: float

    @classmethod
    def of(cls, costs: Sequence[float], price: float) -> Margin:
        mean = math.fsum(costs) / len(costs)
        losing = sum(cost > price for cost in costs) / len(costs)
        return cls(price, price - mean, (price - mean) / price if price else 0.0, losing)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A cap, and the most that one user can cost in a month under it alone."""

    name: str
    cost: float


def ceilings(limits: Sequence[LimitConfig], prices: Prices, *, dearest_call: float) -> list[Ceiling]:
    """Every cap with what it bounds, tightest first: that one bounds the worst case.

    Rolling and calendar caps bound the same number of periods in a month.
    """
    dearest_token = max(prices.prefill, prices.decode) / 10**12
    found = []
    for limit in limits:
        period = Period(limit.period, limit.rolling)
        times = DAYS * 86400 / SECONDS[period.span]
        if limit.requests is not None:
            found.append(Ceiling(f"{limit.requests} requests {period}", times * limit.requests * dearest_call))
        if limit.tokens is not None:
            found.append(Ceiling(f"{limit.tokens} tokens {period}", times * limit.tokens * dearest_token))
        if limit.money is not None:
            found.append(Ceiling(f"{limit.money:g} {prices.currency} {period}", times * limit.money))
    return sorted(found, key=lambda ceiling: ceiling.cost)


@dataclass(frozen=True, slots=True)
class Device:
    """How paid device time was used. Seconds and tokens over the hours that were measured."""

    wall: float
    busy: float
    ideal: float
    prefill_tokens: int
    decode_tokens: int
    prefill: float
    decode: float

    @property
    def busy_share(self) -> float:
        return self.busy / self.wall if self.wall else 0.0

    def derived(self, device_hour: float) -> tuple[float | None, float | None]:
        """(prefill, decode) per million tokens that would have paid for these hours, idle ones too.

        Each kind pays for its part of the busy time; idle time is shared out in the same proportion.
        """
        paid = device_hour * self.wall / 3600
        parts = ((self.prefill, self.prefill_tokens), (self.decode, self.decode_tokens))
        prefill, decode = (
            paid * seconds / self.busy / tokens * 1e6 if tokens and self.busy else None for seconds, tokens in parts
        )
        return prefill, decode
