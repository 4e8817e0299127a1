"""Who a call counts against, and under which caps: the words of the limiter and of everybody who asks it.

Owns the arithmetic of one cap. It must not count anything, nor know who pays for which call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from minserve.config import LimitConfig
from minserve.economics.prices import nano
from minserve.economics.windows import Amount, Counter, Period

ScopeKind = Literal["server", "key", "user", "end_user", "token", "run"]


class Scope(NamedTuple):
    """Whose counter, and the name within its kind."""

    kind: ScopeKind
    name: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Limit:
    """A cap for a period; None = none of that kind. cost in billionths of the currency."""

    period: Period
    requests: int | None = None
    tokens: int | None = None
    cost: int | None = None

    @classmethod
    def of(cls, config: LimitConfig) -> Limit:
        cost = None if config.money is None else nano(config.money)
        return cls(Period(config.period, config.rolling), config.requests, config.tokens, cost)

    @property
    def caps(self) -> tuple[tuple[str, int | None], ...]:
        """(kind, cap) in the order of `Amount.capped`."""
        return ("requests", self.requests), ("tokens", self.tokens), ("money", self.cost)

    def allows(self, used: Amount, more: Amount) -> bool:
        return (
            (self.requests is None or used.requests + more.requests <= self.requests)
            and (self.tokens is None or used.tokens + more.tokens <= self.tokens)
            and (self.cost is None or used.cost + more.cost <= self.cost)
        )

    def surplus(self, used: Amount) -> Amount:
        """How far `used` is above the caps; 0 where it is within them."""
        over = (0 if cap is None else max(0, u - cap) for u, (_, cap) in zip(used.capped, self.caps, strict=True))
        return Amount(*over)


class Payer(NamedTuple):
    """One scope that a call counts against, with its caps. until: when a scope that ends (run, token) is forgotten."""

    scope: Scope
    limits: tuple[Limit, ...]
    until: float | None = None


class Window(NamedTuple):
    """One cap of one payer, and the counter that is held to it."""

    scope: Scope
    limit: Limit
    counter: Counter
