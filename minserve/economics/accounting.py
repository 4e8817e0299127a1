"""The one door to money: reserve before any work, settle exactly once, and a row for everything.

Owns the order of checks and what a call's end means for counters, ledger and alerts. The counters in memory are the
authority, and they change only on the event loop: `reserve` checks and counts in one synchronous step, then awaits the
row's commit, so nothing is computed that a crash could forget. A reservation's refund goes to the window it came from.

It must not know HTTP or the engine: it sees identities, numbers of tokens and RequestOutcomes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from minserve.config import AccountConfig, Config, LimitConfig
from minserve.economics import history
from minserve.economics.alerts import Alert, Alerts, Send
from minserve.economics.clock import SteadyClock
from minserve.economics.keys import Identity, Keyring
from minserve.economics.ledger import Ledger
from minserve.economics.limits import Limit, Limiter, Payer, Scope, Ticket, rate_headers
from minserve.economics.loops import LIFE, Repeats, Runs
from minserve.economics.prices import Prices, money, nano
from minserve.economics.rows import REFUSED, Row
from minserve.economics.schema import FolderLock, LedgerError
from minserve.economics.settlement import Settlement
from minserve.economics.spend import PromptDrift, SpendAlerts
from minserve.economics.tokens import MAX_TTL_S, PageTokens, server_secret
from minserve.economics.windows import ZERO, Amount, Period
from minserve.request import Pool, RequestError

log = logging.getLogger("minserve.accounting")

SERVER = Scope("server")
OnRow = Callable[[Row], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A call as far as it is known: everything when it asks for a reservation, less when it is refused before.

    prompt_tokens: over all prompts. max_tokens: of one choice; choices: n times the number of prompts. digest: of the
    prompts (`prompt_digest`), for the repeat detector. degraded: what was done to it under load, "" for nothing.
    started: time.monotonic() of its arrival, for the row's total_ms.
    """

    id: str
    identity: Identity | None
    endpoint: str = ""
    model: str = ""
    pool: Pool = Pool.INTERACTIVE
    prompt_tokens: int = 0
    max_tokens: int = 0
    choices: int = 1
    digest: bytes | None = None
    degraded: str = ""
    started: float | None = None


class Reservation:
    """What a call may use at most. `settle` once it has ended, however it ended; later calls of it do nothing."""

    __slots__ = ("_accounting", "_started", "_ticket", "row")

    def __init__(self, accounting: Accounting, row: Row, ticket: Ticket, started: float) -> None:
        self._accounting = accounting
        self._ticket: Ticket | None = ticket
        self._started = started
        self.row = row

    @property
    def settled(self) -> bool:
        return self._ticket is None

    @property
    def cost(self) -> int:
        """Billionths of the currency: reserved until settled, then what it really was."""
        return self.row.cost if self.settled else self.row.reserved

    def headers(self) -> dict[str, str]:
        """The call's cost, once it is known."""
        return {"x-minserve-cost": money(self.row.cost)} if self.settled else {}

    def cancel(self) -> None:
        """Give everything back without a row: the call was refused after all."""
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            self._accounting.release(self.row, ticket, ZERO)

    def settle(self, settlement: Settlement) -> bool:
        """Count what was really used, give the rest back, write the row. False if that was done before."""
        if self._ticket is None:
            return False
        ticket, self._ticket = self._ticket, None
        self.row = self._accounting.settle(self.row, ticket, settlement, self._started)
        return True


class Accounting:
    """Everything that costs. Build with `open` before serving; `close` after the last settlement."""

    def __init__(
        self,
        config: Config,
        *,
        ledger: Ledger | None = None,
        token_secret: bytes = b"",
        clock: Callable[[], float] | None = None,
        send_alert: Send | None = None,
        on_row: OnRow | None = None,
    ) -> None:
        """clock: Unix seconds, never decreasing. on_row: called with every finished row (log line, metrics)."""
        self.config = config
        self.prices = Prices.of(config.prices)
        self.clock = clock or SteadyClock(floor=ledger.last_time if ledger else 0.0)
        self.ledger = ledger
        self.limiter = Limiter()
        self.alerts = Alerts(send_alert, attempts=config.alerts.attempts)
        self.keys = Keyring(config.keys, config.local, PageTokens(token_secret))
        self.on_row = on_row
        self.lock: FolderLock | None = None
        self._runs = Runs(self.limiter, config.loops.run_idle_s)
        self._repeats = Repeats(config.loops)
        self._drift = PromptDrift(self.alerts, ratio=config.alerts.drift_ratio, least=config.alerts.drift_min_requests)
        self._user_limits = {name: _limits(user.limits) for name, user in config.users.items()}
        self._account_limits: dict[int, tuple[tuple[Limit, ...], tuple[Limit, ...]]] = {}
        for account in (config.local, *config.keys.values()):
            self._account_limits[id(account)] = _limits(account.limits), _limits(account.end_user_limits)
        self._server_limits, self._spend = self._server_spend()
        self._open_cost = 0
        self._next_seq = 0
        if ledger is not None:
            self._restore(ledger)

    @classmethod
    def open(
        cls,
        config: Config,
        data_folder: Path,
        *,
        send_alert: Send | None = None,
        on_row: OnRow | None = None,
    ) -> Accounting:
        """Lock the data folder, open the ledger, rebuild the counters. LedgerError with a clear message if it can't."""
        lock = FolderLock(data_folder)
        try:
            ledger = None
            if config.ledger.enabled:
                path = Path(config.ledger.path) if config.ledger.path else data_folder / "ledger.db"
                ledger = Ledger(path, durability=config.ledger.durability, retention_days=config.ledger.retention_days)
            secret = server_secret(data_folder / "page-token.secret")
            accounting = cls(config, ledger=ledger, token_secret=secret, send_alert=send_alert, on_row=on_row)
        except BaseException:
            lock.release()
            raise
        accounting.lock = lock
        return accounting

    async def close(self) -> None:
        """Write what is left, then let another server have the data folder. Idempotent."""
        await self.alerts.close()
        if self.ledger is not None:
            await self.ledger.close()
        if self.lock is not None:
            self.lock.release()

    def identify(self, authorization: str | None, origin: str | None = None) -> Identity:
        return self.keys.identify(authorization, origin, now=self.clock())

    # -- one call

    async def reserve(self, admission: Admission) -> Reservation:
        """Check every cap and count the most that the call can use; return when that is on disk.

        RequestError if it may not run: nothing is counted then, and the caller passes it to `refuse`.
        """
        now = self.clock()
        started = time.monotonic() if admission.started is None else admission.started
        identity = admission.identity
        if identity is None:
            raise RequestError("An API key is needed.", status=401, code="missing_api_key", kind="authentication_error")
        self._check_repeats(identity, admission.digest, now)
        completion = admission.max_tokens * admission.choices
        cost = self.prices.cost(admission.prompt_tokens, 0, completion)
        self._check_price(identity.account, cost)
        amount = Amount(1, admission.prompt_tokens + completion, cost)
        try:
            ticket = self.limiter.take(self.payers(identity, now), amount, now)
        except RequestError as error:
            if error.code == "server_budget_exceeded" and self._spend is not None:
                self._spend.exhausted(self._spent(now), now)
            raise
        self._open_cost += cost
        row = self._row(admission, now)
        row.reserved = cost
        reservation = Reservation(self, row, ticket, started)
        await self._commit(reservation)
        self._drift.observe(identity.feature, admission.prompt_tokens, now)
        return reservation

    async def _commit(self, reservation: Reservation) -> None:
        if self.ledger is None:
            return
        try:
            await self.ledger.commit(reservation.row)
        except LedgerError:
            if self.config.ledger.on_failure == "serve":
                return
            reservation.cancel()
            raise RequestError(
                "The server can't record calls now, so it does not take any.",
                status=503,
                code="ledger_unavailable",
                retry_after=10,
            ) from None
        except asyncio.CancelledError:
            reservation.settle(Settlement(finish="abort", status=499, code="client_closed"))
            raise

    def settle(self, row: Row, ticket: Ticket, end: Settlement, started: float) -> Row:
        """The finished row of a call; counters corrected. Reservation.settle is the way in."""
        tokens = end.prompt_tokens + end.completion_tokens
        cost = self.prices.cost(end.prompt_tokens, end.cached_tokens, end.completion_tokens)
        self.release(row, ticket, Amount(1, tokens, cost) if tokens else ZERO)
        total_ms = (time.monotonic() - started) * 1e3
        row = msgspec.structs.replace(row, cost=cost, total_ms=total_ms, **end.columns())
        self._finished(row)
        if self._spend is not None:
            now = self.clock()
            self._spend.check(self._spent(now), now)
        return row

    def release(self, row: Row, ticket: Ticket, actual: Amount) -> None:
        self.limiter.correct(ticket, actual)
        self._open_cost -= row.reserved

    def refuse(self, admission: Admission, error: RequestError) -> None:
        """A row for a call that never got a reservation. Callers without an account are counted, not written."""
        self._record(admission, Settlement(finish=REFUSED, status=error.status, code=error.code))

    def static(self, admission: Admission) -> None:
        """A row for a call that got a fixed text instead of the model: it cost nothing."""
        self._record(admission, Settlement(finish="static", status=200))

    def _record(self, admission: Admission, end: Settlement) -> None:
        row = self._row(admission, self.clock())
        total = None if admission.started is None else (time.monotonic() - admission.started) * 1e3
        self._finished(msgspec.structs.replace(row, total_ms=total, **end.columns()), admission.identity is not None)

    def _finished(self, row: Row, write: bool = True) -> None:
        if write and self.ledger is not None:
            self.ledger.put(row)
        if self.on_row is not None:
            try:
                self.on_row(row)
            except Exception:  # an observer's fault must not cost a client its answer
                log.exception("an observer of the ledger failed")

    def _row(self, admission: Admission, now: float) -> Row:
        identity = admission.identity
        row = Row(
            seq=self._number(),
            time=now,
            id=admission.id,
            pool=admission.pool.value,
            model=admission.model,
            endpoint=admission.endpoint,
            asked_prompt=admission.prompt_tokens,
            max_tokens=admission.max_tokens * admission.choices,
            choices=admission.choices,
            degraded=admission.degraded,
        )
        if identity is not None:
            row.key, row.user, row.end_user = identity.key, identity.user, identity.end_user
            row.feature, row.run = identity.feature, identity.run
            row.run_calls, row.run_cost = identity.run_calls, identity.run_cost
            row.token = identity.token.id if identity.token else ""
        return row

    def _number(self) -> int:
        if self.ledger is not None:
            return self.ledger.number()
        self._next_seq += 1
        return self._next_seq

    # -- who pays

    def payers(self, identity: Identity, now: float) -> list[Payer]:
        """Every scope that a call of `identity` counts against. RequestError 400 if it must name a run."""
        own, per_end_user = self._account_limits[id(identity.account)]
        payers = [
            Payer(SERVER, self._server_limits),
            Payer(Scope("key", (identity.key,)), own),
            Payer(Scope("user", (identity.user,)), self._user_limits.get(identity.user, ())),
            Payer(Scope("end_user", (identity.key, identity.end_user)), per_end_user),
        ]
        if identity.token is not None:
            cap = Limit(LIFE, tokens=identity.token.max_tokens)
            payers.append(Payer(Scope("token", (identity.token.id,)), (cap,), until=identity.token.expires))
        if (run := self._runs.payer(identity, now)) is not None:
            payers.append(run)
        return [payer for payer in payers if payer.limits]

    def headers(self, identity: Identity) -> dict[str, str]:
        """`x-ratelimit-*` for a reply to `identity`."""
        now = self.clock()
        own, per_end_user = self._account_limits[id(identity.account)]
        payers = (
            Payer(Scope("key", (identity.key,)), own),
            Payer(Scope("user", (identity.user,)), self._user_limits.get(identity.user, ())),
            Payer(Scope("end_user", (identity.key, identity.end_user)), per_end_user),
        )
        return rate_headers(self.limiter, payers, now)

    def reset(self, scope: Scope) -> None:
        """An operator forgives: the scope's counters start again at zero, also after a restart."""
        self.limiter.forget(scope)
        if self.ledger is not None:
            self.ledger.execute(*history.reset_statement(scope, self.clock()))

    def _check_price(self, account: AccountConfig, cost: int) -> None:
        if account.max_call_cost is not None and cost > nano(account.max_call_cost):
            raise RequestError(
                f"This call may cost {money(cost)} {self.prices.currency}; this account allows "
                f"{money(nano(account.max_call_cost))} a call. Ask for less (max_tokens, n, a shorter prompt).",
                code="call_too_expensive",
                param="max_tokens",
            )

    def _check_repeats(self, identity: Identity, digest: bytes | None, now: float) -> None:
        if self._repeats.check(identity, digest, now):
            message = f"The same prompt of key {identity.key or '(local)'} keeps coming without a run id: a loop?"
            self.alerts(Alert("loop", message, now, {"key": identity.key, "feature": identity.feature}))

    # -- the server's own limit

    def _server_spend(self) -> tuple[tuple[Limit, ...], SpendAlerts | None]:
        spend = self.config.spend
        if spend.limit is None:
            return (), None
        period = Period(spend.period, spend.rolling)
        limit = nano(spend.limit)
        watch = SpendAlerts(self.alerts, limit, spend.alert_at, self.prices.currency, str(period))
        return (Limit(period, cost=limit),), watch

    def _spent(self, now: float) -> int:
        """Settled money of the server's window: what is counted less what is only reserved."""
        return max(0, self.limiter.used(SERVER, self._server_limits[0].period, now).cost - self._open_cost)

    # -- after a restart

    def _restore(self, ledger: Ledger) -> None:
        now = self.clock()
        periods: dict[str, set[Period]] = {"server": {limit.period for limit in self._server_limits}}
        for own, per_end_user in self._account_limits.values():
            periods.setdefault("key", set()).update(limit.period for limit in own)
            periods.setdefault("end_user", set()).update(limit.period for limit in per_end_user)
        periods["user"] = {limit.period for limits in self._user_limits.values() for limit in limits}
        for kind, found in periods.items():
            for period in found:
                for scope, bucket, amount in history.usage(ledger.database, kind, period, now):
                    self.limiter.counter(scope, period).restore(bucket, amount)
        for scope, bucket, amount in history.usage(ledger.database, "token", LIFE, now, now - MAX_TTL_S):
            self.limiter.restore_life(scope, LIFE, bucket, amount, now + MAX_TTL_S)
        idle = self.config.loops.run_idle_s
        for run in history.runs(ledger.database, now - idle):
            scope = Scope("run", (run.key, run.run))
            self.limiter.restore_life(scope, LIFE, 0, run.used, run.last + idle)
            if run.declared != (None, None):
                self._runs.restore(run.key, run.run, run.declared)
        for feature, hour, calls, tokens in history.prompt_lengths(ledger.database, now - 7 * 86400):
            self._drift.restore(feature, hour, calls, tokens)
        if self._spend is not None:
            self._spend.restore(self._spent(now))


def _limits(configs: Sequence[LimitConfig]) -> tuple[Limit, ...]:
    return tuple(Limit.of(config) for config in configs)
