"""Who pays for a call: the server, its key, its user, its end user, its page token, its run; with which caps, and how
much for one call.

Owns the caps, made once from the configuration. It must not count anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from minserve.config import Config, LimitConfig, SpendConfig
from minserve.economics.caps import Limit, Payer, Scope, ScopeKind
from minserve.economics.keys import Identity
from minserve.economics.loops import LIFE, Runs
from minserve.economics.prices import Prices, money, nano
from minserve.economics.windows import Period
from minserve.request import RequestError

SERVER = Scope("server")


class Payers:
    def __init__(self, config: Config, runs: Runs) -> None:
        self.server = server_limit(config.spend)
        accounts = {"": config.local, **config.keys}
        self._keys = {name: _limits(account.limits) for name, account in accounts.items()}
        self._end_users = {name: _limits(account.end_user_limits) for name, account in accounts.items()}
        self._users = {name: _limits(user.limits) for name, user in config.users.items()}
        self._runs = runs
        self._run_capped = {n for n, a in accounts.items() if (a.run.max_calls, a.run.max_spend) != (None, None)}

    def caps_runs(self, key: str) -> bool:
        """Whether every run of a key has a budget, declared or not."""
        return key in self._run_capped

    def of(self, identity: Identity, now: float) -> list[Payer]:
        """Every scope that a call of `identity` counts against. RequestError 400 if it must name a run."""
        payers = self.shown(identity)
        if self.server is not None:
            payers.insert(0, Payer(SERVER, (self.server,)))
        if identity.token is not None:
            cap = Limit(LIFE, tokens=identity.token.max_tokens)
            payers.append(Payer(Scope("token", (identity.token.id,)), (cap,), until=identity.token.expires))
        if (run := self._runs.payer(identity, now)) is not None:
            payers.append(run)
        return payers

    def shown(self, identity: Identity) -> list[Payer]:
        """The scopes whose room a caller may see in rate-limit headers.

        A call that names no end user counts as one end user without a name, so leaving it out dodges nothing. A key
        that was removed while its call runs has no caps any more.
        """
        payers = (
            Payer(Scope("key", (identity.key,)), self._keys.get(identity.key, ())),
            Payer(Scope("user", (identity.user,)), self._users.get(identity.user, ())),
            Payer(Scope("end_user", (identity.key, identity.end_user)), self._end_users.get(identity.key, ())),
        )
        return [payer for payer in payers if payer.limits]

    @property
    def counted(self) -> set[tuple[ScopeKind, str, Period]]:
        """Every (kind, name, period) in which calls are counted; end users and runs by their key."""
        tables: dict[ScopeKind, dict[str, tuple[Limit, ...]]] = {
            "key": self._keys,
            "user": self._users,
            "end_user": self._end_users,
        }
        found: set[tuple[ScopeKind, str, Period]] = {
            (kind, name, limit.period)
            for kind, table in tables.items()
            for name, limits in table.items()
            for limit in limits
        }
        found |= {("run", name, LIFE) for name in self._run_capped}
        return found | ({("server", "", self.server.period)} if self.server else set())

    def periods(self) -> dict[ScopeKind, set[Period]]:
        """Which periods each kind of scope is counted in; of runs there is only their life."""
        found: dict[ScopeKind, set[Period]] = {"key": set(), "user": set(), "end_user": set(), "server": set()}
        for kind, _, period in self.counted:
            if period != LIFE:
                found[kind].add(period)
        return found


def check_cost(identity: Identity, cost: int, prices: Prices) -> None:
    """RequestError if a call may cost more than its account allows one, or limits a run's spend where nothing costs."""
    if identity.run_cost is not None and prices.free:
        raise RequestError(
            "This server has no prices, so a run's spend can't be limited; X-Run-Max-Calls can.",
            code="no_prices",
            param="metadata.run_max_spend",
        )
    most = identity.account.max_call_cost
    if most is not None and cost > nano(most):
        raise RequestError(
            f"This call may cost {money(cost)} {prices.currency}; this account allows {money(nano(most))} a call. "
            "Ask for less (max_tokens, n, a shorter prompt).",
            code="call_too_expensive",
            param="max_tokens",
        )


def server_limit(spend: SpendConfig) -> Limit | None:
    if spend.limit is None:
        return None
    return Limit(Period(spend.period, spend.rolling), cost=nano(spend.limit))


def _limits(configs: Sequence[LimitConfig]) -> tuple[Limit, ...]:
    return tuple(Limit.of(config) for config in configs)
