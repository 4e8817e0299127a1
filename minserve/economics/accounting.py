"""The one door to money: reserve before any work, settle exactly once, and a row for everything.

Owns the order of checks and what a call's end means for counters, ledger and alerts. The counters in memory are the
authority, and they change only on the event loop: `reserve` checks and counts in one synchronous step, then awaits the
row's commit, so nothing is computed that a crash could forget. A reservation's refund goes to the window it came from.

It must not know HTTP or the engine: it sees identities, numbers of tokens and RequestOutcomes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from minserve.config import Config
from minserve.economics.alerts import Alerts, Send
from minserve.economics.caps import Scope
from minserve.economics.clock import SteadyClock
from minserve.economics.counters import Counters
from minserve.economics.device import DeviceHours, priced
from minserve.economics.history import reset_statement
from minserve.economics.journal import Journal, OnRow
from minserve.economics.keys import Identity, Keyring
from minserve.economics.ledger import Ledger, ledger_path
from minserve.economics.limiter import Ticket
from minserve.economics.loops import Repeats
from minserve.economics.payers import check_cost
from minserve.economics.prices import Prices
from minserve.economics.rate_limits import rate_headers
from minserve.economics.reconfigure import reconfigure
from minserve.economics.reservation import Admission, Reservation
from minserve.economics.rows import REFUSED, STATIC, Row
from minserve.economics.schema import lock_folder, lock_ledger
from minserve.economics.server_budget import ServerBudget
from minserve.economics.settlement import Settlement
from minserve.economics.tokens import PageTokens, server_secret
from minserve.economics.windows import ZERO, Amount
from minserve.file_lock import FileLock
from minserve.request import RequestError, RequestOutcome, StepRecord


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
        self.clock = clock or SteadyClock(floor=ledger.last_time if ledger else 0.0)
        self.prices = priced(config.prices, ledger.database, self.clock()) if ledger else Prices.of(config.prices)
        self.ledger = ledger
        self.alerts = Alerts(send_alert, attempts=config.alerts.attempts)
        self.tokens = PageTokens(token_secret)
        self.keys = Keyring(config.keys, config.local, self.tokens)
        self.locks: list[FileLock] = []
        self._repeats = Repeats(config.loops, self.alerts)
        self.counters = Counters(config, self.alerts)
        self.budget = ServerBudget(self.counters.limiter, self.alerts)
        self._journal = Journal(ledger, required=config.ledger.on_failure != "serve", on_row=on_row)
        self._open: dict[int, tuple[Identity, Ticket]] = {}
        self._device = DeviceHours(ledger.execute, self.clock) if ledger else None
        self.watch_spend()
        if ledger is not None:
            now = self.clock()
            self.counters.restore(ledger.database, now)
            self.budget.restore(now)

    @classmethod
    def open(
        cls,
        config: Config,
        data_folder: Path,
        *,
        send_alert: Send | None = None,
        on_row: OnRow | None = None,
    ) -> Accounting:
        """Lock data folder and ledger, open it, rebuild the counters. LedgerError with a clear message if it can't."""
        with contextlib.ExitStack() as undo:
            locks = [lock_folder(data_folder)]
            undo.callback(locks[0].release)
            ledger, kept = None, config.ledger
            if kept.enabled:
                path = ledger_path(kept, data_folder)
                locks.append(lock_ledger(path))
                undo.callback(locks[1].release)
                ledger = Ledger(
                    path,
                    durability=kept.durability,
                    retention_days=kept.retention_days,
                    run_idle_s=config.loops.run_idle_s,
                )
                undo.callback(ledger.database.close)
            secret = server_secret(data_folder / "page-token.secret")
            accounting = cls(config, ledger=ledger, token_secret=secret, send_alert=send_alert, on_row=on_row)
            accounting.locks = locks
            undo.pop_all()
        return accounting

    async def close(self) -> None:
        """Write what is left, then let another server have the data folder and the ledger. Idempotent."""
        await self.alerts.close()
        if self.ledger is not None and self._device is not None:
            self._device.write()
            await self.ledger.close()
            self._device = None
        for lock in self.locks:
            lock.release()

    def end_now(self, timeout: float) -> None:
        """What was settled is on the disk then, or `timeout` seconds have passed. For a process that ends at once."""
        if self.ledger is not None:
            self.ledger.end_now(timeout)

    def observe(self, record: StepRecord | RequestOutcome) -> None:
        """An engine's observer: how the device's paid time is spent."""
        if self._device is not None and isinstance(record, StepRecord):
            self._device.step(record)

    def identify(self, authorization: str | None, origin: str | None = None) -> Identity:
        return self.keys.identify(authorization, origin, now=self.clock())

    async def reconfigure(self, config: Config) -> None:
        """Keys, accounts, caps and prices are those of `config` from now on; see `reconfigure.py`."""
        await reconfigure(self, config)

    # -- one call

    async def reserve(self, admission: Admission) -> Reservation:
        """Check every cap and count the most that the call can use; return when that is on disk.

        RequestError if it may not run: nothing is counted then, and the caller passes it to `refuse`.
        """
        now = self.clock()
        started = time.monotonic() if admission.started is None else admission.started
        identity = _payer(admission)
        self._repeats.check(identity, admission.prompts, now)
        completion = admission.max_tokens * admission.choices
        cost = self.prices.cost(admission.prompt_tokens, 0, completion)
        check_cost(identity, cost, self.prices)
        amount = Amount(1, admission.prompt_tokens + completion, cost, held=cost)
        try:
            ticket = self.counters.take(identity, amount, now)
        except RequestError as error:
            if error.code == "server_budget_exceeded":
                self.budget.exhausted(now)
            raise
        row = admission.row(self._journal.number(), now)
        row.reserved = cost
        self._open[row.seq] = identity, ticket
        reservation = Reservation(self, row, ticket, started)
        await self._commit(reservation)
        self.counters.drift.observe(identity.feature, admission.prompt_tokens, now)
        return reservation

    async def _commit(self, reservation: Reservation) -> None:
        try:
            await self._journal.begin(reservation.row)
        except RequestError:
            reservation.cancel()
            raise
        except asyncio.CancelledError:
            reservation.settle(Settlement(finish="abort", status=499, code="client_closed"))
            raise

    def price(self, row: Row, prompt: int, cached: int, completion: int) -> int:
        """What so much use costs: never more than was reserved, though prices may have risen meanwhile."""
        return min(self.prices.cost(prompt, cached, completion), row.reserved)

    def settle(self, row: Row, ticket: Ticket, end: Settlement, started: float) -> Row:
        """The finished row of a call; counters corrected. Reservation.settle is the way in."""
        tokens = end.prompt_tokens + end.completion_tokens
        cost = self.price(row, end.prompt_tokens, end.cached_tokens, end.completion_tokens)
        self.release(row, ticket, Amount(1, tokens, cost) if tokens else ZERO)
        row = self._journal.finish(row, started, end, cost)
        self.budget.check(self.clock())
        return row

    def release(self, row: Row, ticket: Ticket, actual: Amount) -> None:
        self.counters.limiter.correct(ticket, actual)
        del self._open[row.seq]

    def refuse(self, admission: Admission, error: RequestError) -> None:
        """A row for a call that never got a reservation."""
        self._journal.record(admission, self.clock(), Settlement(finish=REFUSED, status=error.status, code=error.code))

    def static(self, admission: Admission) -> None:
        """Count a call that gets a static text instead of the model: one request, no tokens, no cost.

        RequestError, to be passed to `refuse`, if even that is over a cap.
        """
        now, identity = self.clock(), _payer(admission)
        self.counters.take(identity, Amount(1), now)
        self._journal.record(admission, now, Settlement(finish=STATIC, status=200))

    @property
    def recording(self) -> bool:
        """Calls can be taken: their rows can be written, or need not be."""
        return self._journal.recording

    def headers(self, identity: Identity) -> dict[str, str]:
        """`x-ratelimit-*` for a reply to `identity`."""
        return rate_headers(self.counters.shown(identity), self.clock())

    def reset(self, scope: Scope) -> bool:
        """An operator forgives: the scope's counters start again at zero, also after a restart. False if nothing is
        counted there. What a run has declared stays declared."""
        now = self.clock()
        if not self.counters.forget(scope, now):
            return False
        if self.ledger is not None:
            self.ledger.execute(*reset_statement(scope, now))
        self.budget.check(now)
        return True

    # -- the server's own limit

    def watch_spend(self) -> None:
        self.budget.watch(self.counters.payers.server, self.config.spend.alert_at, self.prices.currency)

    @property
    def spent_share(self) -> float:
        """The used share of the server's spending limit; 0 without one."""
        return self.budget.share(self.clock())

    def affordable_in(self, share: float) -> float | None:
        """Seconds until no more than `share` of the server's spending limit is used. None: not by waiting."""
        return self.budget.affordable_in(share, self.clock())


def _payer(admission: Admission) -> Identity:
    if admission.identity is None:
        raise RequestError("An API key is needed.", status=401, code="missing_api_key", kind="authentication_error")
    return admission.identity
