"""Accounting as the gateway uses it: reserve at the most, settle once, at what was used."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from minserve.economics.accounting import Accounting
from minserve.economics.reservation import Reservation
from minserve.economics.rows import Row
from minserve.economics.settlement import Settlement
from minserve.request import RequestError
from tests.economics.calls import DONE, call, counters, day, local, refused, rows


async def test_fifty_calls_against_a_budget_for_two_admit_exactly_two(tmp_path: Path) -> None:  # bug: 66
    accounting = Accounting.open(local(limits=day(requests=2)), tmp_path)
    calls = [call(accounting, id=f"r{i}") for i in range(50)]
    results = await asyncio.gather(*map(accounting.reserve, calls), return_exceptions=True)
    admitted = [r for r in results if isinstance(r, Reservation)]
    errors = [r for r in results if isinstance(r, RequestError)]
    assert (len(admitted), len(errors)) == (2, 48)
    assert {(e.status, e.code, e.should_retry) for e in errors} == {(429, "budget_exceeded", False)}
    assert all(reservation.settle(DONE) for reservation in admitted)
    await accounting.close()
    assert len(rows(tmp_path)) == 2


@pytest.mark.parametrize("cap", [{"money": 25e-6 * 2}, {"tokens": 30}])
async def test_money_and_tokens_are_reserved_at_their_maximum(tmp_path: Path, cap: dict[str, Any]) -> None:  # bug: 66
    """A call may use 5 + 10 tokens, 25 millionths: two fit, a third does not, whatever they will really use."""
    accounting = Accounting.open(local(limits=day(**cap)), tmp_path)
    first, second = [await accounting.reserve(call(accounting)) for _ in range(2)]
    assert (await refused(accounting, call(accounting))).code == "budget_exceeded"
    first.settle(DONE)  # gives back 7 tokens, 14 millionths
    assert (await refused(accounting, call(accounting))).code == "budget_exceeded"
    await accounting.reserve(call(accounting, prompt_tokens=1, max_tokens=6))
    second.settle(DONE)
    await accounting.close()


async def test_n_choices_are_reserved_n_times_and_the_prompt_once(tmp_path: Path) -> None:
    accounting = Accounting.open(local(), tmp_path)
    reservation = await accounting.reserve(call(accounting, choices=3))
    assert reservation.cost == (5 * 1 + 30 * 2) * 1000
    await accounting.close()


async def test_settling_twice_counts_once(tmp_path: Path) -> None:  # bug: 66
    seen: list[Row] = []
    accounting = Accounting.open(local(limits=day(tokens=100)), tmp_path, on_row=seen.append)
    reservation = await accounting.reserve(call(accounting))
    assert reservation.settle(DONE)
    assert not reservation.settle(DONE)
    reservation.cancel()
    assert accounting.headers(accounting.identify(None))["x-ratelimit-remaining-tokens"] == "92"
    assert len(seen) == 1
    assert reservation.cost == 11_000
    assert reservation.headers() == {"x-minserve-reserved-cost": "0.000025", "x-minserve-cost": "0.000011"}
    await accounting.close()


async def test_failures_before_any_work_are_refunded_entirely(tmp_path: Path) -> None:  # bug: 66
    accounting = Accounting.open(local(limits=day(requests=1, tokens=20, money=1.0)), tmp_path)
    for end in (("error", 500), ("abort", 499), ("refused", 503)):
        reservation = await accounting.reserve(call(accounting))
        reservation.settle(Settlement(finish=end[0], status=end[1]))
    reservation = await accounting.reserve(call(accounting))
    reservation.settle(Settlement(finish="abort", status=499, prompt_tokens=5, completion_tokens=1))
    assert (await refused(accounting, call(accounting))).code == "budget_exceeded"
    await accounting.close()
    assert rows(tmp_path, "finish, cost") == [
        *(("error", 0), ("abort", 0), ("refused", 0), ("abort", 7000), ("refused", 0))
    ]


async def test_a_static_text_counts_as_a_request_and_as_nothing_else(tmp_path: Path) -> None:
    config = local(limits=day(requests=2, tokens=15))
    accounting = Accounting.open(config, tmp_path)
    accounting.static(call(accounting, degraded="static"))
    (await accounting.reserve(call(accounting))).settle(DONE)  # all of its tokens are left
    before = counters(accounting)
    with pytest.raises(RequestError, match="allows 2 requests per day") as caught:
        accounting.static(call(accounting, degraded="static"))
    assert caught.value.status == 429
    assert counters(accounting) == before
    await accounting.close()
    again = Accounting.open(config, tmp_path)
    assert counters(again) == before
    await again.close()


async def test_a_client_that_leaves_while_the_reservation_is_written_is_settled(tmp_path: Path) -> None:
    accounting = Accounting.open(local(limits=day(requests=1)), tmp_path)
    task = asyncio.ensure_future(accounting.reserve(call(accounting)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (await accounting.reserve(call(accounting))).settle(DONE)
    await accounting.close()
    assert rows(tmp_path, "finish, status") == [("abort", 499), ("stop", 200)]


async def test_an_observer_that_fails_costs_nobody_an_answer(tmp_path: Path) -> None:
    def broken(row: Row) -> None:
        raise ZeroDivisionError

    accounting = Accounting.open(local(), tmp_path, on_row=broken)
    assert (await accounting.reserve(call(accounting))).settle(DONE)
    await accounting.close()
