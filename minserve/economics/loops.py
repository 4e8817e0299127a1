"""Runaway loops: a budget for each run, and the same prompt sent again and again by somebody who names no run.

Owns what runs declared and how often a prompt was seen lately (a keyed digest of it, never its text). The counting of a
run is the limiter's: a run is one more scope, whose only window is its life.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from minserve.config import LoopsConfig
from minserve.economics.alerts import Alert, Alerts
from minserve.economics.caps import Limit, Payer, Scope
from minserve.economics.keys import Identity
from minserve.economics.limiter import Limiter
from minserve.economics.prices import nano
from minserve.economics.windows import Period
from minserve.request import RequestError

LIFE = Period("ever")
_MAX_PROMPTS = 4096
_SALT = secrets.token_bytes(16)  # of this process: a digest means nothing outside it

Budget = tuple[int | None, int | None]  # calls, cost in billionths


def prompt_digest(prompts: Sequence[Sequence[int]]) -> bytes:
    """A digest of token ids, only good for comparing within this process."""
    h = hashlib.blake2b(digest_size=16, key=_SALT)
    for prompt in prompts:
        h.update(len(prompt).to_bytes(8, "little"))
        h.update(array("i", prompt).tobytes())
    return h.digest()


class Runs:
    """Budgets of runs. A run belongs to its key: another key can neither use nor exhaust it."""

    def __init__(self, limiter: Limiter, idle_s: float) -> None:
        self._limiter = limiter
        self._idle_s = idle_s
        self._declared: dict[Scope, Budget] = {}
        self._sweep_at = 1024
        # Runs that nothing limits have no counter; hashes tell that they have begun, which costs a tenth of one. Each
        # set is for idle_s, so a run is remembered for that long at least.
        self._begun: set[int] = set()
        self._begun_before: set[int] = set()
        self._turn_at = 0.0

    def restore(self, key: str, run: str, budget: Budget) -> None:
        self._declared[Scope("run", (key, run))] = budget

    def began(self, key: str, run: str, now: float) -> None:
        """A call of a run was admitted: from now on it is too late to declare a budget."""
        scope = Scope("run", (key, run))
        if not run or self._limiter.knows(scope):
            return
        if now >= self._turn_at:
            self._begun_before, self._begun, self._turn_at = self._begun, set(), now + self._idle_s
        self._begun.add(hash(scope))

    def take_over(self, other: Runs) -> None:
        """What is known already, for a limiter that was made anew."""
        self._declared |= other._declared
        self._begun, self._begun_before, self._turn_at = other._begun, other._begun_before, other._turn_at

    def payer(self, identity: Identity, now: float) -> Payer | None:
        """The scope that a call of a run counts against, None if nothing limits it.

        RequestError 400: the account wants a run id and there is none, or the run's first call declared otherwise.
        """
        rules = identity.account.run
        if not identity.run:
            if rules.require_id:
                raise RequestError(
                    "This account must name a run: header X-Run-ID, or metadata.run_id.",
                    code="run_id_required",
                    param="metadata.run_id",
                )
            return None
        scope = Scope("run", (identity.key, identity.run))
        declared = self._declare(scope, (identity.run_calls, identity.run_cost))
        calls = _least(rules.max_calls, declared[0])
        cost = _least(None if rules.max_spend is None else nano(rules.max_spend), declared[1])
        if calls is None and cost is None:
            return None
        return Payer(scope, (Limit(LIFE, requests=calls, cost=cost),), until=now + self._idle_s)

    def _declare(self, scope: Scope, said: Budget) -> Budget:
        known = self._declared.get(scope)
        if self._limiter.knows(scope) or hash(scope) in self._begun or hash(scope) in self._begun_before:
            known = known or (None, None)
            if said not in ((None, None), known):
                raise RequestError(
                    "A run's budget is declared by its first call and can't change.",
                    code="run_budget_changed",
                    param="metadata.run_id",
                )
            return known
        if said == (None, None):
            self._declared.pop(scope, None)
        else:
            if len(self._declared) >= self._sweep_at:
                self._declared = {s: budget for s, budget in self._declared.items() if self._limiter.knows(s)}
                self._sweep_at = max(1024, 2 * len(self._declared))
            self._declared[scope] = said
        return said


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


class Repeats:
    """Counts equal prompts of a key that come without a run id, within a window that begins with the first of them."""

    def __init__(self, config: LoopsConfig, alerts: Alerts) -> None:
        self._config = config
        self._alerts = alerts
        self._seen: OrderedDict[tuple[str, bytes], tuple[float, int]] = OrderedDict()

    def check(self, identity: Identity, prompts: Sequence[Sequence[int]], now: float) -> None:
        """Alert when the limit is just passed; RequestError 429 beyond it where that is wanted."""
        if self._config.repeats == "off" or not prompts or identity.run:
            return
        key = (identity.key, prompt_digest(prompts))
        began, count = self._seen.pop(key, (now, 0))
        if now - began >= self._config.repeat_window_s:
            began, count = now, 0
        count += 1
        self._seen[key] = began, count
        if len(self._seen) > _MAX_PROMPTS:
            self._seen.popitem(last=False)
        if count == self._config.repeat_limit + 1:
            message = f"The same prompt of key {identity.key or '(local)'} keeps coming without a run id: a loop?"
            self._alerts(Alert("loop", message, now, {"key": identity.key, "feature": identity.feature}))
        if count > self._config.repeat_limit and self._config.repeats == "refuse":
            raise RequestError(
                f"The same prompt came more than {self._config.repeat_limit} times within "
                f"{self._config.repeat_window_s:g} s. If this is no runaway loop, name the run (X-Run-ID).",
                status=429,
                code="loop_detected",
                kind="rate_limit_exceeded",
                retry_after=max(0.0, began + self._config.repeat_window_s - now),
                should_retry=False,
            )
