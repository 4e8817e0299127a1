"""The server's own spending limit: how much of it is spent, when there is room again, and the alerts on the way.

Owns what is watched: what running calls hold counts against the limit, but it is not spent yet. It must not refuse
anything: the limit is one more scope of the limiter.
"""

from __future__ import annotations

from minserve.economics.alerts import Alerts
from minserve.economics.caps import Limit
from minserve.economics.limiter import Limiter
from minserve.economics.payers import SERVER
from minserve.economics.spend import SpendAlerts
from minserve.economics.windows import Amount


class ServerBudget:
    """Money in billionths of the currency, `now` in Unix seconds. limiter: may be replaced, as the counters are."""

    def __init__(self, limiter: Limiter, alerts: Alerts) -> None:
        self.limiter = limiter
        self._alerts = alerts
        self._limit: Limit | None = None
        self._watch: SpendAlerts | None = None

    def watch(self, limit: Limit | None, thresholds: tuple[float, ...], currency: str) -> None:
        """Another limit, or none, from now on. thresholds: shares of it that alert when they are passed."""
        self._limit, self._watch = limit, None
        if limit is not None:
            self._watch = SpendAlerts(self._alerts, limit.cost or 0, thresholds, currency, str(limit.period))

    def restore(self, now: float) -> None:
        """After a restart: what was passed before is not said again."""
        if self._watch is not None:
            self._watch.restore(self._spent(now))

    def check(self, now: float) -> None:
        """Something was settled, or the limit has changed."""
        if self._watch is not None:
            self._watch.check(self._spent(now), now)

    def exhausted(self, now: float) -> None:
        """A call was refused for the limit."""
        if self._watch is not None:
            self._watch.exhausted(self._spent(now), now)

    def share(self, now: float) -> float:
        """The used share of the limit; 0 without one."""
        if self._limit is None:
            return 0.0
        return self._spent(now) / self._limit.cost if self._limit.cost else 1.0

    def affordable_in(self, share: float, now: float) -> float | None:
        """Seconds until no more than `share` of the limit is used. None: not by waiting."""
        assert self._limit is not None
        surplus = self._spent(now) - int(share * (self._limit.cost or 0))
        return self.limiter.counter(SERVER, self._limit.period).wait(now, Amount(cost=max(0, surplus)))

    def _spent(self, now: float) -> int:
        """Settled money of the window: what is counted less what is only reserved."""
        assert self._limit is not None
        used = self.limiter.used(SERVER, self._limit.period, now)
        return used.cost - used.held
