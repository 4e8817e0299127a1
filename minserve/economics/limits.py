"""Caps: check and count in one step, for all windows of everybody who pays for a call, or for none of them.

Owns the counters of the server, keys, users, end users, page tokens and runs. Everything here is synchronous on the
event loop: between the check and the increment nobody else can run, so fifty calls against a budget for two admit two.
It must not know the ledger, prices or HTTP headers' transport.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minserve.config import LimitConfig
from minserve.economics.prices import money, nano
from minserve.economics.windows import SECONDS, ZERO, Amount, Counter, Period
from minserve.request import RequestError

# Names that clients choose (end users) share one counter beyond this many, so that memory is bounded and a new name
# never buys a new budget.
MAX_NAMES = 200_000
OTHERS = "(others)"


class Scope(NamedTuple):
    """Whose counter: "server", "key", "user", "end_user", "token" or "run", and the name within that kind."""

    kind: str
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


Places = tuple[tuple[Counter, int], ...]  # counters and the bucket in each


@dataclass(slots=True)
class Ticket:
    """What was counted for one call, when and where: a correction goes to the window of the reservation."""

    amount: Amount
    time: float
    places: Places


class Limiter:
    def __init__(self) -> None:
        self._counters: dict[Scope, dict[Period, Counter]] = {}
        self._until: dict[Scope, float] = {}
        self._names = 0  # how many end users have counters
        self._sweep_at = 1024

    def take(self, payers: Sequence[Payer], amount: Amount, now: float) -> Ticket:
        """Count `amount` against every window of every payer, or RequestError 429 and nothing is counted."""
        self._sweep(now)
        counted = self._counted(payers)
        for scope, limit, counter in counted:
            counter.advance(now)
            if not limit.allows(counter.total, amount):
                surplus = limit.surplus(counter.total.plus(amount))
                raise refusal(scope, limit, amount, surplus, counter.wait(now, surplus))
        self._until.update((payer.scope, payer.until) for payer in payers if payer.until is not None)
        return Ticket(amount, now, _add(counted, amount, now))

    def place(self, ticket: Ticket, payers: Sequence[Payer]) -> Places:
        """Count what another limiter gave a ticket for, at its own time, over a cap or not; where."""
        return _add(self._counted(payers), ticket.amount, ticket.time)

    def _counted(self, payers: Sequence[Payer]) -> list[tuple[Scope, Limit, Counter]]:
        return [(p.scope, limit, self.counter(p.scope, limit.period)) for p in payers for limit in p.limits]

    def correct(self, ticket: Ticket, actual: Amount) -> None:
        """Replace what the ticket reserved by what really happened."""
        difference = actual.minus(ticket.amount)
        if difference != ZERO:
            for counter, bucket in ticket.places:
                counter.correct(bucket, difference)
        ticket.amount = actual

    def counter(self, scope: Scope, period: Period) -> Counter:
        """The counter of a scope's period, made when it is first asked for."""
        counters = self._counters.get(scope)
        if counters is None:
            if scope.kind == "end_user":
                if self._names >= MAX_NAMES and scope.name[-1] != OTHERS:
                    return self.counter(scope._replace(name=(*scope.name[:-1], OTHERS)), period)
                self._names += 1
            counters = self._counters[scope] = {}
        if period not in counters:
            counters[period] = Counter(period)
        return counters[period]

    def restore_life(self, scope: Scope, period: Period, bucket: int, amount: Amount, until: float) -> None:
        """What a scope that ends (run, token) had used before a restart."""
        self.counter(scope, period).restore(bucket, amount)
        self._until[scope] = until

    def used(self, scope: Scope, period: Period, now: float) -> Amount:
        counter = self._counters.get(scope, {}).get(period)
        if counter is None:
            return ZERO
        counter.advance(now)
        return counter.total

    def knows(self, scope: Scope) -> bool:
        """Whether anything was counted for a scope and still matters."""
        return any(counter.buckets for counter in self._counters.get(scope, {}).values())

    def forget(self, scope: Scope) -> None:
        """Drop a scope's counters; open tickets keep the old ones, so their refunds reach nobody."""
        self._until.pop(scope, None)
        if self._counters.pop(scope, None) is not None and scope.kind == "end_user":
            self._names -= 1

    def __iter__(self) -> Iterator[tuple[Scope, Period, Amount]]:
        for scope, counters in self._counters.items():
            for period, counter in counters.items():
                yield scope, period, counter.total

    def _sweep(self, now: float) -> None:
        """Drop counters whose windows have emptied, whenever their number has doubled (amortized O(1) a call)."""
        if len(self._counters) < self._sweep_at:
            return
        for scope, counters in list(self._counters.items()):
            for counter in counters.values():
                counter.advance(now)
            if self._until.get(scope, now + 1) <= now or not any(counter.buckets for counter in counters.values()):
                self.forget(scope)
        self._sweep_at = max(1024, 2 * len(self._counters))


def _add(counted: Iterable[tuple[Scope, Limit, Counter]], amount: Amount, time: float) -> Places:
    """Once in each counter, though several limits may look at one."""
    distinct = {id(counter): counter for _, _, counter in counted}
    return tuple((counter, counter.add(time, amount)) for counter in distinct.values())


def refusal(scope: Scope, limit: Limit, amount: Amount, surplus: Amount, wait: float | None) -> RequestError:
    """The 429 for a cap that is reached. Only a minute's cap is worth a client's automatic retry."""
    index = next(i for i, over in enumerate(surplus.capped) if over)
    kind, cap = limit.caps[index]
    needs, left = amount.capped[index], amount.capped[index] - surplus.capped[index]
    said = money if kind == "money" else str
    shown = f"a cost of {money(cap or 0)}" if kind == "money" else f"{cap} {kind}"
    message = f"{_WHOSE[scope.kind]} allows {shown} {limit.period}"
    if limit.surplus(amount).capped[index]:
        message += f"; this call alone may need {said(needs)}. Ask for less (max_tokens, n, a shorter prompt)."
        wait = None
    elif left > 0 and scope.kind != "server":  # what all spend together is the operator's business
        message += f" and has {said(left)} left; this call may need {said(needs)}."
    else:
        message += ", and that is used up."
    if wait is not None:
        if limit.period.rolling:  # its last bucket stays up to a part longer, but nobody has to wait for that
            wait = min(wait, SECONDS[limit.period.span])
        message += f" There is room again in {duration(wait)}."
    brief = limit.period.span == "minute" and wait is not None
    code = _CODES.get(scope.kind) or ("rate_limit_exceeded" if limit.period.span == "minute" else "budget_exceeded")
    return RequestError(
        message,
        status=429,
        code=code,
        kind="rate_limit_exceeded" if code == "rate_limit_exceeded" else "insufficient_quota",
        retry_after=wait,
        should_retry=None if brief else False,
    )


_WHOSE = {
    "server": "The server's spending limit",
    "key": "This API key",
    "user": "This account",
    "end_user": "This user",
    "token": "This page token",
    "run": "This run",
}
_CODES = {"server": "server_budget_exceeded", "run": "run_budget_exceeded"}


def duration(seconds: float) -> str:
    """As rate-limit headers spell it: 20ms, 1s, 6m0s, 1h0m0s. Rounded up, so that waiting that long is enough."""
    if seconds < 1:
        return f"{-int(-seconds * 1000 // 1)}ms"
    whole = -int(-seconds // 1)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minute}m{second}s"
    return f"{minute}m{second}s" if minute else f"{second}s"


def rate_headers(limiter: Limiter, payers: Iterable[Payer], now: float) -> dict[str, str]:
    """`x-ratelimit-*` of the tightest window, of requests and of tokens; nothing where there is no cap."""
    headers: dict[str, str] = {}
    for index, kind in enumerate(("requests", "tokens")):
        tightest: tuple[int, int, Counter] | None = None
        for payer in payers:
            for limit in payer.limits:
                cap = limit.caps[index][1]
                if cap is None:
                    continue
                counter = limiter.counter(payer.scope, limit.period)
                counter.advance(now)
                left = max(0, cap - counter.total.capped[index])
                if tightest is None or left < tightest[0]:
                    tightest = left, cap, counter
        if tightest is not None:
            left, cap, counter = tightest
            headers[f"x-ratelimit-limit-{kind}"] = str(cap)
            headers[f"x-ratelimit-remaining-{kind}"] = str(left)
            if (reset := counter.reset_in(now)) is not None:
                headers[f"x-ratelimit-reset-{kind}"] = duration(reset)
    return headers
