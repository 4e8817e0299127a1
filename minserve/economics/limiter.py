"""Caps: check and count in one step, for all windows of everybody who pays for a call, or for none of them.

Owns the counters of the server, keys, users, end users, page tokens and runs. Everything here is synchronous on the
event loop: between the check and the increment nobody else can run, so fifty calls against a budget for two admit two.
It must not know the ledger, prices or HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from minserve.economics.caps import Payer, Scope, Window
from minserve.economics.rate_limits import refusal
from minserve.economics.windows import ZERO, Amount, Counter, Period

# Names that clients choose (end users) share one counter beyond this many, so that memory is bounded and a new name
# never buys a new budget.
MAX_NAMES = 200_000
OTHERS = "(others)"

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
        windows = self.windows(payers)
        for window in windows:
            window.counter.advance(now)
            if not window.limit.allows(window.counter.total, amount):
                raise refusal(window, amount, now)
        self._until.update((payer.scope, payer.until) for payer in payers if payer.until is not None)
        return Ticket(amount, now, _add(windows, amount, now))

    def place(self, ticket: Ticket, payers: Sequence[Payer]) -> Places:
        """Count what another limiter gave a ticket for, at its own time, over a cap or not; where."""
        return _add(self.windows(payers), ticket.amount, ticket.time)

    def windows(self, payers: Iterable[Payer]) -> list[Window]:
        """Where a call of these payers counts."""
        return [Window(p.scope, limit, self.counter(p.scope, limit.period)) for p in payers for limit in p.limits]

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


def _add(windows: Iterable[Window], amount: Amount, time: float) -> Places:
    """Once in each counter, though several limits may look at one."""
    distinct = {id(window.counter): window.counter for window in windows}
    return tuple((counter, counter.add(time, amount)) for counter in distinct.values())
