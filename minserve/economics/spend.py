"""Watching money: alerts when parts of the server's limit are spent, and when a feature's prompts grow.

Owns which alerts were given and the mean prompt length of each feature per hour. It must not refuse anything: the
limit itself is one more scope of the limiter.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from minserve.economics.alerts import Alert, Alerts
from minserve.economics.prices import money

_HOURS = 7 * 24
WEEK_S = _HOURS * 3600.0
_MAX_FEATURES = 1000
_REARM = 0.1  # a rolling window must fall this far below a threshold before it can alert again
_AGAIN_HOURS = 24


class SpendAlerts:
    """One alert for each threshold of a limit that is passed; a new window arms them again."""

    def __init__(self, alerts: Alerts, limit: int, thresholds: tuple[float, ...], currency: str, period: str) -> None:
        """limit in billionths; thresholds are shares of it, as (0.5, 0.8, 1.0)."""
        self._alerts = alerts
        self._limit = limit
        self._thresholds = sorted(thresholds)
        self._currency = currency
        self._period = period
        self._passed = 0

    def restore(self, spent: int) -> None:
        """After a restart: what was passed before is not said again."""
        self._passed = sum(self._share(spent) >= t for t in self._thresholds)

    def check(self, spent: int, now: float) -> None:
        share = self._share(spent)
        while self._passed and share < self._thresholds[self._passed - 1] - _REARM:
            self._passed -= 1
        while self._passed < len(self._thresholds) and share >= self._thresholds[self._passed]:
            self._passed += 1
            self._alert(self._thresholds[self._passed - 1], spent, now)

    def exhausted(self, spent: int, now: float) -> None:
        """A call was refused for the limit: it is used up, though a reservation may still give some of it back."""
        if self._passed < len(self._thresholds):
            self._passed = len(self._thresholds)
            self._alert(self._thresholds[-1], spent, now)

    def _share(self, spent: int) -> float:
        return spent / self._limit if self._limit else 1.0

    def _alert(self, threshold: float, spent: int, now: float) -> None:
        message = (
            f"{threshold:.0%} of the server's spending limit reached: {money(spent)} of {money(self._limit)} "
            f"{self._currency} {self._period}"
        )
        values: dict[str, object] = {"threshold": threshold, "spent": money(spent), "limit": money(self._limit)}
        self._alerts(Alert("spend", message, now, values))


class PromptDrift:
    """A feature's mean prompt length over its last calls against its trailing week.

    A longer system prompt or more retrieved text multiplies the cost of every call; nobody notices a template change
    otherwise. Both sides need `least` calls. A feature alerts at most once a day.
    """

    def __init__(self, alerts: Alerts, *, ratio: float, least: int) -> None:
        self._alerts = alerts
        self._ratio = ratio
        self._least = least
        self._features: OrderedDict[str, _Feature] = OrderedDict()  # called last comes last

    def restore(self, feature: str, hour: int, calls: int, tokens: int) -> None:
        """Hours in order."""
        self._feature(feature).hours.append([hour, calls, tokens])

    def observe(self, feature: str, prompt_tokens: int, now: float) -> None:
        found = self._feature(feature)
        hour = int(now / 3600)
        if not found.hours or found.hours[-1][0] != hour:
            found.hours.append([hour, 0, 0])
            while found.hours[0][0] <= hour - _HOURS:
                found.hours.popleft()
        found.hours[-1][1] += 1
        found.hours[-1][2] += prompt_tokens
        found.recent_calls += 1
        found.recent_tokens += prompt_tokens
        if found.recent_calls >= self._least:
            self._compare(feature, found, hour, now)
            found.recent_calls = found.recent_tokens = 0

    def _compare(self, name: str, found: _Feature, hour: int, now: float) -> None:
        calls = sum(h[1] for h in found.hours) - found.recent_calls
        tokens = sum(h[2] for h in found.hours) - found.recent_tokens
        if calls < self._least or tokens == 0 or hour < found.quiet_until:
            return
        before, recent = tokens / calls, found.recent_tokens / found.recent_calls
        ratio = recent / before
        if 1 / self._ratio < ratio < self._ratio:
            return
        found.quiet_until = hour + _AGAIN_HOURS
        message = (
            f"Prompts of feature {name} have changed: {recent:.0f} tokens on average over the last "
            f"{found.recent_calls} calls, {before:.0f} over the week before ({ratio:.2f} times)"
        )
        values: dict[str, object] = {"feature": name, "mean": round(recent, 1), "week": round(before, 1)}
        self._alerts(Alert("drift", message, now, values))

    def _feature(self, name: str) -> _Feature:
        """Beyond a bound the one that was not called for longest is forgotten: clients choose these names."""
        found = self._features.pop(name, None) or _Feature()
        self._features[name] = found
        if len(self._features) > _MAX_FEATURES:
            self._features.popitem(last=False)
        return found


class _Feature:
    __slots__ = ("hours", "quiet_until", "recent_calls", "recent_tokens")

    def __init__(self) -> None:
        self.hours: deque[list[int]] = deque()  # [hour, calls, prompt tokens], oldest first, of the last week
        self.recent_calls = 0
        self.recent_tokens = 0
        self.quiet_until = 0
