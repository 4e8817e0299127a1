"""What a restart remembers, and a ledger that can't be written, is taken, or isn't there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from minserve.config import AccountConfig, Config, LedgerConfig, LimitConfig, SpendConfig, UserConfig
from minserve.economics.accounting import Accounting
from minserve.economics.keys import narrow
from minserve.economics.schema import LedgerError
from tests.economics.calls import DONE, PRICES, call, counters, day, keyed, local, refused, rows


@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("period", ["hour", "day", "month"])
async def test_a_restart_keeps_every_counter(tmp_path: Path, period: str, rolling: bool) -> None:  # bug: 66
    caps = (LimitConfig(period=period, rolling=rolling, requests=3, tokens=1000, money=1.0),)  # type: ignore[arg-type]
    config = Config(
        keys={"web": keyed(caps, end_user_limits=caps)},
        users={"alice": UserConfig(limits=caps)},
        prices=PRICES,
        spend=SpendConfig(limit=1.0, period=period, rolling=rolling),  # type: ignore[arg-type]
    )
    accounting = Accounting.open(config, tmp_path)
    for i in range(3):
        caller = narrow(accounting.identify("Bearer one"), {}, None, f"u{i}")
        (await accounting.reserve(call(accounting, caller))).settle(DONE)
    before = counters(accounting)
    assert len(before) == 6
    await accounting.close()
    again = Accounting.open(config, tmp_path)
    assert counters(again) == before
    await refused(again, call(again, again.identify("Bearer one")))
    await again.close()


async def test_an_unwritable_ledger_fails_closed(tmp_path: Path) -> None:
    accounting = Accounting.open(local(limits=day(requests=1)), tmp_path)
    ledger = accounting.ledger
    assert ledger is not None
    ledger.database.execute("PRAGMA query_only = ON")
    error = await refused(accounting, call(accounting))
    assert (error.status, error.code, error.retry_after) == (503, "ledger_unavailable", 10)
    assert not accounting.recording
    ledger.database.execute("PRAGMA query_only = OFF")
    (await accounting.reserve(call(accounting))).settle(DONE)  # the refused one had been given back
    await accounting.close()
    assert rows(tmp_path, "finish") == [("stop",)]


async def test_a_ledger_that_can_be_written_again_is_found_out_without_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minserve.economics.ledger.RETRY_S", 0.02)
    accounting = Accounting.open(local(), tmp_path)
    assert accounting.ledger is not None
    accounting.ledger.database.execute("PRAGMA query_only = ON")
    await refused(accounting, call(accounting))
    await asyncio.sleep(0.1)
    assert not accounting.recording  # it was tried again, and failed again
    accounting.ledger.database.execute("PRAGMA query_only = OFF")
    await asyncio.sleep(0.1)
    assert accounting.recording
    await accounting.close()


async def test_an_unwritable_ledger_can_be_told_to_fail_open(tmp_path: Path) -> None:
    config = Config(ledger=LedgerConfig(on_failure="serve"))
    accounting = Accounting.open(config, tmp_path)
    ledger = accounting.ledger
    assert ledger is not None
    ledger.database.execute("PRAGMA query_only = ON")
    reservation = await accounting.reserve(call(accounting))
    assert accounting.recording
    ledger.database.execute("PRAGMA query_only = OFF")
    reservation.settle(DONE)
    await accounting.close()
    assert rows(tmp_path, "finish") == [("stop",)]


async def test_two_servers_with_folders_of_their_own_can_not_share_a_ledger(tmp_path: Path) -> None:
    """Both would give their rows the same numbers, and the later row would replace the other's."""
    config = Config(ledger=LedgerConfig(path=str(tmp_path / "shared.db")))
    accounting = Accounting.open(config, tmp_path / "a")
    with pytest.raises(LedgerError, match=r"Another minserve .* \(ledger\.path\)"):
        Accounting.open(config, tmp_path / "b")
    await accounting.close()
    await Accounting.open(config, tmp_path / "b").close()


async def test_two_servers_on_one_folder_are_refused_and_a_failed_start_frees_it(tmp_path: Path) -> None:
    accounting = Accounting.open(local(), tmp_path)
    with pytest.raises(Exception, match="Another minserve"):
        Accounting.open(local(), tmp_path)
    await accounting.close()
    (tmp_path / "ledger.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(Exception, match="ledger"):
        Accounting.open(local(), tmp_path)
    (tmp_path / "ledger.db").unlink()
    secret = tmp_path / "page-token.secret"
    secret.write_bytes(b"short")
    with pytest.raises(ValueError, match="32 bytes"):
        Accounting.open(local(), tmp_path)
    secret.unlink()
    await Accounting.open(local(), tmp_path).close()


async def test_without_a_ledger_the_caps_still_hold(tmp_path: Path) -> None:
    config = Config(ledger=LedgerConfig(enabled=False), local=AccountConfig(limits=day(requests=1)))
    accounting = Accounting.open(config, tmp_path)
    (await accounting.reserve(call(accounting))).settle(DONE)
    await refused(accounting, call(accounting))
    await accounting.close()
    assert not (tmp_path / "ledger.db").exists()
