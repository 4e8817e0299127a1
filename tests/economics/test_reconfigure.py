"""Other keys, caps and prices while calls run: nothing is forgotten, nobody gets a second budget."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from minserve.config import (
    AccountConfig,
    Config,
    KeyConfig,
    LimitConfig,
    PricesConfig,
    RunConfig,
    SpendConfig,
    UserConfig,
)
from minserve.economics.accounting import Accounting
from minserve.economics.caps import Scope
from minserve.economics.keys import digest, narrow
from minserve.economics.ledger import Ledger
from minserve.economics.reservation import Admission, Reservation
from minserve.economics.rows import Row
from minserve.economics.settlement import Settlement
from minserve.request import RequestError

PRICES = PricesConfig(prefill=1.0, decode=2.0)
DONE = Settlement(finish="stop", status=200, prompt_tokens=5, completion_tokens=3)


def caps(*limits: LimitConfig, **fields: Any) -> Config:
    return Config(local=AccountConfig(limits=limits), prices=PRICES, **fields)


def key(secret: str, *limits: LimitConfig, user: str = "ann") -> KeyConfig:
    return KeyConfig(sha256=digest(secret).hex(), user=user, limits=limits)


def day(**fields: Any) -> LimitConfig:
    return LimitConfig(period="day", **fields)


async def reserve(accounting: Accounting, secret: str = "", run: str = "") -> Reservation:
    identity = accounting.identify(f"Bearer {secret}" if secret else None)
    identity = narrow(identity, {"X-Run-ID": run} if run else {}, None, None)
    return await accounting.reserve(Admission(id="r", identity=identity, prompt_tokens=5, max_tokens=10))


async def room(accounting: Accounting, secret: str = "") -> int:
    """How many more calls get in before the first refusal, up to 20; they stay open."""
    for count in range(20):
        try:
            await reserve(accounting, secret)
        except RequestError:
            return count
    return 20


async def test_a_lower_cap_holds_at_once_and_counts_what_was_used(tmp_path: Path) -> None:
    accounting = Accounting.open(caps(day(requests=10)), tmp_path)
    for _ in range(3):
        (await reserve(accounting)).settle(DONE)
    await accounting.reconfigure(caps(day(requests=5)))
    assert await room(accounting) == 2
    await accounting.close()


@pytest.mark.parametrize("limit", [LimitConfig(period="hour", rolling=True, requests=6), day(tokens=65)])
async def test_a_new_cap_knows_what_was_used_before_it_and_what_runs_now(tmp_path: Path, limit: LimitConfig) -> None:
    """Two calls of 8 tokens were done before, two more end after it: 4 of 6 calls are used, 32 of 65 tokens."""
    accounting = Accounting.open(caps(), tmp_path)
    for _ in range(2):
        (await reserve(accounting)).settle(DONE)
    running = [await reserve(accounting) for _ in range(2)]
    await accounting.reconfigure(caps(limit))
    for reservation in running:
        reservation.settle(DONE)  # gives back 7 each, also in the counters that are new
    assert await room(accounting) == 2
    await accounting.close()


async def test_counters_after_a_change_are_those_after_a_restart(tmp_path: Path) -> None:
    before = Config(keys={"a": key("a", day(requests=9)), "b": key("b")}, prices=PRICES)
    after = Config(
        keys={"a": key("a", day(requests=9)), "b": key("b", day(tokens=100), LimitConfig(period="month", money=1.0))},
        users={"ann": UserConfig(limits=(day(requests=50),))},
        prices=PRICES,
        spend=SpendConfig(limit=5.0),
    )
    accounting = Accounting.open(before, tmp_path)
    for secret in "aabbb":
        (await reserve(accounting, secret)).settle(DONE)
    await accounting.reconfigure(after)
    changed = {(scope, period): amount for scope, period, amount in accounting.counters.limiter}
    await accounting.close()
    restarted = Accounting.open(after, tmp_path)
    assert {(scope, period): amount for scope, period, amount in restarted.counters.limiter} == changed
    assert len(changed) >= 5
    await restarted.close()


async def test_derived_prices_follow_what_the_device_did_since(tmp_path: Path) -> None:
    prices = PricesConfig(device_hour=3.6, prefill_tokens_per_s=1000.0, decode_tokens_per_s=100.0)
    accounting = Accounting.open(Config(prices=prices), tmp_path)
    assert accounting.ledger is not None
    assert accounting.prices.decode == 10 * 10**6
    for hour in range(int(accounting.clock() / 3600) - 30, int(accounting.clock() / 3600)):
        idle_half = (hour, 3600.0, 1800.0, 0.0, 0, 180_000, 0.0, 1800.0)
        accounting.ledger.execute("INSERT INTO device_hours VALUES (?, ?, ?, ?, ?, ?, ?, ?)", idle_half)
    await accounting.ledger.flush()
    await accounting.reconfigure(accounting.config)
    assert accounting.prices.decode == pytest.approx(20 * 10**6, rel=0.01)
    await accounting.close()
    again = Accounting.open(Config(prices=prices), tmp_path)
    assert again.prices.decode == pytest.approx(20 * 10**6, rel=0.01)
    await again.close()


async def test_many_changes_while_calls_come_and_go_lose_nothing(tmp_path: Path) -> None:
    accounting = Accounting.open(caps(), tmp_path)

    async def caller() -> None:
        for _ in range(10):
            reservation = await reserve(accounting)
            await asyncio.sleep(0.001)
            reservation.settle(DONE)

    async def operator() -> None:
        for limits in ((day(tokens=10**6),), (), (LimitConfig(period="hour", requests=999),), (day(requests=999),)):
            await accounting.reconfigure(caps(*limits))
            await asyncio.sleep(0.005)

    await asyncio.gather(operator(), *(caller() for _ in range(8)))
    assert [(amount.requests, amount.tokens) for _, _, amount in accounting.counters.limiter] == [(80, 640)]
    await accounting.close()


async def test_a_removed_key_is_refused_and_its_running_call_still_ends(tmp_path: Path) -> None:
    accounting = Accounting.open(Config(keys={"a": key("a", day(requests=5)), "b": key("b")}), tmp_path)
    running = await reserve(accounting, "a")
    caller = accounting.identify("Bearer a")
    await accounting.reconfigure(Config(keys={"b": key("b"), "c": key("c", day(requests=1))}))
    with pytest.raises(RequestError, match="not valid"):
        accounting.identify("Bearer a")
    assert accounting.headers(caller) == {}
    assert running.settle(DONE)
    assert await room(accounting, "c") == 1
    await accounting.close()


async def test_a_call_that_runs_while_prices_rise_costs_at_most_what_it_reserved(tmp_path: Path) -> None:
    rows: list[Row] = []
    accounting = Accounting.open(caps(), tmp_path, on_row=rows.append)
    running = await reserve(accounting)
    await accounting.reconfigure(Config(prices=PricesConfig(prefill=1000.0, decode=1000.0)))
    running.settle(DONE)
    (await reserve(accounting)).settle(DONE)
    assert [row.cost for row in rows] == [25_000, 8_000_000]
    await accounting.close()


async def test_a_spending_limit_that_is_already_passed_alerts_at_once(tmp_path: Path) -> None:
    sent: list[dict[str, object]] = []

    async def send(alert: dict[str, object]) -> None:
        sent.append(alert)

    accounting = Accounting.open(caps(), tmp_path, send_alert=send)
    (await reserve(accounting)).settle(DONE)  # 11 millionths
    await accounting.reconfigure(caps(spend=SpendConfig(limit=20e-6)))
    assert await room(accounting) == 0
    await accounting.close()
    assert [alert["values"]["threshold"] for alert in sent][:1] == [0.5]  # type: ignore[index]


async def test_without_a_ledger_a_new_cap_begins_at_zero_and_old_ones_go_on() -> None:
    accounting = Accounting(caps(day(requests=4)))
    (await reserve(accounting)).settle(DONE)
    await accounting.reconfigure(caps(day(requests=4), LimitConfig(period="hour", requests=2)))
    assert await room(accounting) == 2
    await accounting.reconfigure(caps(day(requests=4)))
    assert await room(accounting) == 1


async def test_prices_that_can_not_be_meant_change_nothing(tmp_path: Path) -> None:
    accounting = Accounting.open(caps(day(requests=1)), tmp_path)
    with pytest.raises(ValueError, match=r"prices\.cached"):
        await accounting.reconfigure(Config(prices=PricesConfig(prefill=1.0, cached=2.0)))
    assert await room(accounting) == 1
    await accounting.close()


async def test_a_running_call_that_a_reset_forgave_is_not_counted_again(tmp_path: Path) -> None:
    accounting = Accounting.open(caps(day(requests=1)), tmp_path)
    running = await reserve(accounting)
    assert accounting.reset(Scope("key", ("",)))
    await accounting.reconfigure(caps(day(requests=1), LimitConfig(period="hour", requests=1)))
    running.settle(DONE)
    assert await room(accounting) == 1
    await accounting.close()


async def test_a_running_call_is_counted_in_the_minute_it_came_in(tmp_path: Path) -> None:
    now = 1.8e9
    ledger = Ledger(tmp_path / "ledger.db")
    accounting = Accounting(caps(), ledger=ledger, clock=lambda: now)
    await reserve(accounting)
    now += 60.0
    await accounting.reconfigure(caps(LimitConfig(period="minute", requests=1)))
    assert await room(accounting) == 1
    await accounting.close()


async def test_a_new_budget_of_runs_knows_what_a_run_has_used(tmp_path: Path) -> None:
    accounting = Accounting.open(caps(), tmp_path)
    for _ in range(3):
        (await reserve(accounting, run="r")).settle(DONE)
    await accounting.reconfigure(Config(local=AccountConfig(run=RunConfig(max_calls=4)), prices=PRICES))
    (await reserve(accounting, run="r")).settle(DONE)
    with pytest.raises(RequestError, match="This run allows 4 requests"):
        await reserve(accounting, run="r")
    await accounting.close()
