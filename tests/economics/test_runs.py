"""Budgets of runs, whatever happens to the rows that hold them: restarts, retention, refusals, a reload."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from minserve.config import AccountConfig, Config, LimitConfig, PricesConfig
from minserve.economics.accounting import Accounting
from minserve.economics.keys import narrow
from minserve.economics.ledger import Ledger
from minserve.economics.reservation import Admission, Reservation
from minserve.economics.settlement import Settlement
from minserve.request import RequestError

DAY = 86_400.0
DONE = Settlement(finish="stop", status=200, prompt_tokens=5, completion_tokens=5)
PRICED = PricesConfig(prefill=1.0, decode=2.0)


@dataclass
class Books:
    """An accounting whose clock stands still unless a test moves it, and that can be closed and opened again."""

    folder: Path
    config: Config = field(default_factory=Config)
    retention_days: int = 0
    now: float = 1_790_000_000.0

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        ledger = Ledger(
            self.folder / "l.db",
            retention_days=self.retention_days,
            run_idle_s=self.config.loops.run_idle_s,
            clock=lambda: self.now,
        )
        self.books = Accounting(self.config, ledger=ledger, clock=lambda: self.now)

    async def restart(self) -> None:
        await self.books.close()
        self.open()

    async def reserve(self, run: str = "r", **headers: str) -> Reservation:
        said = {"X-Run-ID": run} | {name.replace("_", "-"): value for name, value in headers.items()}
        identity = narrow(self.books.identify(None), said, None, None)
        admission = Admission(id="x", identity=identity, prompt_tokens=5, max_tokens=5)
        try:
            return await self.books.reserve(admission)
        except RequestError as error:
            self.books.refuse(admission, error)
            raise

    async def call(self, run: str = "r", **headers: str) -> str:
        """What became of a call: "" or the code of its refusal."""
        try:
            (await self.reserve(run, **headers)).settle(DONE)
        except RequestError as error:
            return error.code
        return ""


async def test_retention_keeps_the_rows_of_a_run_that_may_go_on(tmp_path: Path) -> None:
    books = Books(tmp_path, retention_days=1)
    assert await books.call(X_Run_Max_Calls="3") == ""
    for _ in range(2):
        books.now += 0.9 * DAY
        assert await books.call() == ""
    assert await books.call() == "run_budget_exceeded"
    await books.restart()
    assert await books.call() == "run_budget_exceeded"
    books.now += 2 * DAY  # longer than a run may be idle: forgotten, and its rows go
    assert await books.call("other") == ""
    await books.books.close()
    await books.restart()
    assert await books.call() == ""
    await books.books.close()


async def test_what_a_refused_call_declared_binds_nobody(tmp_path: Path) -> None:
    limits = (LimitConfig(period="minute", requests=1),)
    books = Books(tmp_path, Config(local=AccountConfig(limits=limits)))
    assert await books.call("other") == ""
    assert await books.call(X_Run_Max_Calls="1000") == "rate_limit_exceeded"
    for code in ("", "run_budget_exceeded"):
        books.now += 61
        assert await books.call(**({"X_Run_Max_Calls": "1"} if not code else {})) == code
    await books.restart()
    books.now += 61
    assert await books.call() == "run_budget_exceeded"
    await books.books.close()


async def test_a_reload_while_runs_go_on_loses_no_reservation(tmp_path: Path) -> None:
    limits = (LimitConfig(period="minute", requests=2),)
    books = Books(tmp_path, Config(local=AccountConfig(limits=limits)))
    for _ in range(2):
        assert await books.call("other") == ""
    assert await books.call(X_Run_Max_Calls="1000") == "rate_limit_exceeded"
    books.now += 61
    running = [await books.reserve("other"), await books.reserve(X_Run_Max_Calls="5")]
    more = (*limits, LimitConfig(period="day", tokens=1000))
    await books.books.reconfigure(Config(local=AccountConfig(limits=more)))
    for reservation in running:
        reservation.settle(DONE)
    day = next(
        total for scope, period, total in books.books.counters.limiter if scope.kind == "key" and "day" in str(period)
    )
    assert (day.requests, day.tokens) == (4, 40)
    books.now += 61
    assert await books.call(X_Run_Max_Calls="6") == "run_budget_changed"
    await books.books.close()


@pytest.mark.parametrize("restart", [False, True])
async def test_a_run_that_began_without_a_budget_gets_none_later(tmp_path: Path, restart: bool) -> None:
    books = Books(tmp_path)
    assert await books.call() == ""
    if restart:
        await books.restart()
    assert await books.call(X_Run_Max_Calls="1") == "run_budget_changed"
    assert await books.call() == ""
    await books.books.close()


async def test_a_spend_can_not_be_declared_where_nothing_costs_anything(tmp_path: Path) -> None:
    books = Books(tmp_path)
    assert await books.call(X_Run_Max_Spend="0.5") == "no_prices"
    await books.books.reconfigure(Config(prices=PRICED))
    assert await books.call(X_Run_Max_Spend="0.5") == ""
    await books.books.close()
