"""An operator's reset: what counts anew, what stays, and that a restart respects it."""

from __future__ import annotations

from pathlib import Path

import pytest

from minserve.economics.accounting import Accounting
from minserve.economics.caps import Scope
from minserve.economics.clock import SteadyClock
from minserve.economics.keys import narrow
from minserve.economics.ledger import Ledger
from minserve.economics.windows import Period
from tests.economics.calls import DONE, call, day, local, refused


async def test_an_operator_can_reset_a_budget_and_a_restart_respects_it(tmp_path: Path) -> None:  # bug: 65
    config = local(limits=day(requests=1))
    accounting = Accounting.open(config, tmp_path)
    open_one = await accounting.reserve(call(accounting))
    await refused(accounting, call(accounting))
    assert accounting.reset(Scope("key", ("",)))
    assert not accounting.reset(Scope("user", ("local",)))  # nothing is counted there
    open_one.settle(DONE)  # its refund reaches nobody
    await accounting.close()
    again = Accounting.open(config, tmp_path)
    (await again.reserve(call(again))).settle(DONE)
    await refused(again, call(again))
    await again.close()


@pytest.mark.parametrize("set_back", [60.0, 10 * 86400.0])
async def test_calls_after_a_reset_count_though_the_clock_was_set_back(tmp_path: Path, set_back: float) -> None:
    """A reset under a clock that was days ahead is none, nor is a call."""
    wall, used, key = 1.8e9, list[int](), Scope("key", ("",))

    def now() -> float:
        return wall

    for reset in (True, False, False):
        ledger = Ledger(tmp_path / "ledger.db")
        clock = SteadyClock(now, floor=ledger.last_time)
        accounting = Accounting(local(limits=day(requests=9)), ledger=ledger, clock=clock)
        used.append(accounting.counters.limiter.used(key, Period("day"), clock()).requests)
        (await accounting.reserve(call(accounting))).settle(DONE)
        if reset:
            wall += 30.0
            assert accounting.reset(key)
            wall -= set_back
        await accounting.close()
    assert used == [0, 0, 1]


async def test_a_run_that_was_reset_keeps_the_budget_it_declared(tmp_path: Path) -> None:
    accounting = Accounting.open(local(), tmp_path)
    declaring = narrow(accounting.identify(None), {"X-Run-ID": "r", "X-Run-Max-Calls": "1"}, None, None)
    later = narrow(accounting.identify(None), {"X-Run-ID": "r"}, None, None)
    (await accounting.reserve(call(accounting, declaring))).settle(DONE)
    await refused(accounting, call(accounting, later))
    assert accounting.reset(Scope("run", ("", "r")))
    (await accounting.reserve(call(accounting, later))).settle(DONE)
    assert (await refused(accounting, call(accounting, later))).code == "run_budget_exceeded"
    await accounting.close()
    again = Accounting.open(local(), tmp_path)
    assert (await refused(again, call(again, later))).code == "run_budget_exceeded"
    await again.close()
