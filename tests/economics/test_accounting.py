"""Accounting as the gateway uses it: reserve, settle once, refuse; what a restart remembers."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from minserve.config import (
    AccountConfig,
    Config,
    KeyConfig,
    LedgerConfig,
    LimitConfig,
    LoopsConfig,
    PricesConfig,
    RunConfig,
    SpendConfig,
    UserConfig,
)
from minserve.economics.accounting import Accounting, Admission, Reservation
from minserve.economics.clock import SteadyClock
from minserve.economics.keys import Identity, digest, narrow
from minserve.economics.ledger import Ledger
from minserve.economics.limits import Scope
from minserve.economics.loops import prompt_digest
from minserve.economics.rows import Row
from minserve.economics.schema import LedgerError
from minserve.economics.settlement import Settlement
from minserve.economics.windows import Period
from minserve.request import FinishReason, Pool, RequestError, RequestOutcome, Usage

PRICES = PricesConfig(prefill=1.0, cached=0.5, decode=2.0)
DONE = Settlement(finish="stop", status=200, prompt_tokens=5, completion_tokens=3)


def local(**fields: Any) -> Config:
    return Config(local=AccountConfig(**fields), prices=PRICES)


def day(**caps: Any) -> tuple[LimitConfig, ...]:
    return (LimitConfig(period="day", **caps),)


def keyed(limits: tuple[LimitConfig, ...] = (), **fields: Any) -> KeyConfig:
    return KeyConfig(sha256=digest("one").hex(), user="alice", limits=limits, **fields)


def call(accounting: Accounting, identity: Identity | None = None, **fields: Any) -> Admission:
    asked = {"id": "r", "prompt_tokens": 5, "max_tokens": 10, **fields}
    return Admission(identity=identity or accounting.identify(None), **asked)


def counters(accounting: Accounting) -> dict[object, object]:
    return {(scope, period): total for scope, period, total in accounting.limiter}


async def refused(accounting: Accounting, admission: Admission) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await accounting.reserve(admission)
    accounting.refuse(admission, caught.value)
    return caught.value


def rows(folder: Path, columns: str = "*", where: str = "1") -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / "ledger.db")) as database:
        return database.execute(f"SELECT {columns} FROM calls WHERE {where} ORDER BY seq").fetchall()


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


async def test_the_first_eight_calls_of_a_new_user_race_for_one_budget(tmp_path: Path) -> None:  # bug: 66
    config = Config(keys={"web": keyed(end_user_limits=day(requests=3))})
    accounting = Accounting.open(config, tmp_path)
    caller = narrow(accounting.identify("Bearer one"), {}, None, "new")
    results = await asyncio.gather(
        *(accounting.reserve(call(accounting, caller)) for _ in range(8)), return_exceptions=True
    )
    assert sum(isinstance(r, Reservation) for r in results) == 3
    other = narrow(accounting.identify("Bearer one"), {}, None, "another")
    await accounting.reserve(call(accounting, other))
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


async def test_a_cap_follows_the_key_whatever_the_request_says_of_itself(tmp_path: Path) -> None:  # bug: 65
    config = Config(keys={"web": keyed(day(requests=2))})
    accounting = Accounting.open(config, tmp_path)
    me = accounting.identify("Bearer one")
    for headers, metadata, user in (({"X-Feature": "x"}, None, "u1"), ({}, {"run_id": "r"}, "u2")):
        (await accounting.reserve(call(accounting, narrow(me, headers, metadata, user)))).settle(DONE)
    for user in ("alice", "bob", "admin"):
        caller = narrow(me, {"X-Feature": user, "X-Run-ID": user}, None, user)
        assert (await refused(accounting, call(accounting, caller))).code == "budget_exceeded"
    await accounting.close()


async def test_leaving_the_user_out_dodges_no_end_user_cap(tmp_path: Path) -> None:  # bug: 65
    accounting = Accounting.open(Config(keys={"web": keyed(end_user_limits=day(requests=1))}), tmp_path)
    me = accounting.identify("Bearer one")
    await accounting.reserve(call(accounting, me))
    assert (await refused(accounting, call(accounting, me))).code == "budget_exceeded"
    await accounting.close()


async def test_a_users_cap_holds_over_all_of_their_keys(tmp_path: Path) -> None:  # bug: 65
    two = KeyConfig(sha256=digest("two").hex(), user="alice")
    config = Config(keys={"web": keyed(), "cli": two}, users={"alice": UserConfig(limits=day(requests=2))})
    accounting = Accounting.open(config, tmp_path)
    for secret in ("one", "two"):
        await accounting.reserve(call(accounting, accounting.identify(f"Bearer {secret}")))
    for secret in ("one", "two"):
        await refused(accounting, call(accounting, accounting.identify(f"Bearer {secret}")))
    await accounting.close()


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
        used.append(accounting.limiter.used(key, Period("day"), clock()).requests)
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


async def test_a_fixed_text_counts_as_a_request_and_as_nothing_else(tmp_path: Path) -> None:
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


async def test_a_row_says_what_was_asked_and_what_was_done(tmp_path: Path) -> None:
    seen: list[Row] = []
    accounting = Accounting.open(Config(keys={"web": keyed()}, prices=PRICES), tmp_path, on_row=seen.append)
    caller = narrow(accounting.identify("Bearer one"), {"X-Feature": "search", "X-Run-ID": "r9"}, None, "bob")
    outcome = RequestOutcome(
        id="r#0",
        group="r",
        pool=Pool.BULK,
        usage=Usage(5, 4, 3),
        max_tokens=10,
        finish=FinishReason.LENGTH,
        error_code=None,
        arrival=0.0,
        queue=0.25,
        ttft=0.5,
        total=2.0,
        gaps=(0.1, 0.3),
        preemptions=0,
    )
    known = {"model": "smol", "endpoint": "chat", "degraded": "shrink", "started": 0.0, "asked_max_tokens": 99}
    asked = call(accounting, caller, pool=Pool.BULK, **known)
    reservation = await accounting.reserve(asked)
    reservation.settle(Settlement.of([outcome], status=200))
    await accounting.close()
    columns = "key, user, end_user, feature, run, pool, model, endpoint, asked_prompt, prompt_tokens, cached_tokens"
    assert rows(tmp_path, columns) == [("web", "alice", "bob", "search", "r9", "bulk", "smol", "chat", 5, 5, 4)]
    columns = "completion_tokens, max_tokens, reserved, cost, queue_ms, ttft_ms, itl_p50_ms, itl_p99_ms, finish, status"
    assert rows(tmp_path, columns) == [(3, 10, 25_000, 9000, 250.0, 500.0, 100.0, 300.0, "length", 200)]
    assert rows(tmp_path, "asked_max_tokens") == [(99,)]
    assert rows(tmp_path, "degraded, code, id") == [("shrink", "", "r")]
    assert seen[0].total_ms is not None


async def test_refused_calls_have_rows(tmp_path: Path) -> None:
    seen: list[Row] = []
    accounting = Accounting.open(local(), tmp_path, on_row=seen.append)
    error = RequestError("too long", status=400, code="context_length_exceeded")
    accounting.refuse(call(accounting, prompt_tokens=99), error)
    accounting.refuse(Admission(id="x", identity=None), RequestError("no", status=401, code="invalid_api_key"))
    accounting.static(call(accounting, degraded="static"))
    await accounting.close()
    assert [(row.finish, row.status, row.code) for row in seen] == [
        ("refused", 400, "context_length_exceeded"),
        ("refused", 401, "invalid_api_key"),
        ("static", 200, ""),
    ]
    assert rows(tmp_path, "finish, asked_prompt, prompt_tokens, cost") == [
        ("refused", 99, 0, 0),
        ("refused", 0, 0, 0),
        ("static", 5, 0, 0),
    ]


async def test_numbers_that_no_column_holds_are_kept_as_the_largest_that_matter(tmp_path: Path) -> None:
    accounting = Accounting.open(local(), tmp_path)
    huge = call(accounting, max_tokens=16, choices=10**30, asked_max_tokens=10**30)
    accounting.refuse(huge, RequestError("too many", code="invalid_value", param="n"))
    await accounting.close()
    assert rows(tmp_path, "choices, max_tokens, asked_max_tokens") == [(2**31 - 1,) * 3]


async def test_callers_without_an_account_do_not_fill_the_disk(tmp_path: Path) -> None:
    seen: list[Row] = []
    accounting = Accounting.open(local(), tmp_path, on_row=seen.append)
    for _ in range(1000):
        accounting.refuse(Admission(id="x", identity=None), RequestError("no", status=401, code="invalid_api_key"))
    await accounting.close()
    assert len(seen) == 1000  # counted and logged
    assert 60 <= len(rows(tmp_path, "code")) < 100


async def test_an_observer_that_fails_costs_nobody_an_answer(tmp_path: Path) -> None:
    def broken(row: Row) -> None:
        raise ZeroDivisionError

    accounting = Accounting.open(local(), tmp_path, on_row=broken)
    assert (await accounting.reserve(call(accounting))).settle(DONE)
    await accounting.close()


# -- the controls


async def test_a_minutes_cap_may_be_retried_and_says_when(tmp_path: Path) -> None:
    accounting = Accounting.open(local(limits=(LimitConfig(period="minute", rolling=True, requests=1),)), tmp_path)
    await accounting.reserve(call(accounting))
    error = await refused(accounting, call(accounting))
    assert (error.status, error.code, error.kind) == (429, "rate_limit_exceeded", "rate_limit_exceeded")
    assert error.should_retry is None
    assert error.retry_after is not None
    assert 59 <= error.retry_after <= 60
    headers = accounting.headers(accounting.identify(None))
    assert headers["x-ratelimit-limit-requests"] == "1"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-reset-requests"] in ("1m0s", "1m1s", "60s", "1m0s")
    await accounting.close()


async def test_a_call_that_can_never_fit_is_told_so(tmp_path: Path) -> None:
    accounting = Accounting.open(local(limits=(LimitConfig(period="minute", tokens=10),)), tmp_path)
    error = await refused(accounting, call(accounting))
    assert error.should_retry is False
    assert error.retry_after is None
    assert "this call alone may need 15" in error.message
    await accounting.close()


async def test_a_call_dearer_than_the_account_allows_is_refused(tmp_path: Path) -> None:
    accounting = Accounting.open(local(max_call_cost=20e-6), tmp_path)
    error = await refused(accounting, call(accounting))
    assert (error.status, error.code) == (400, "call_too_expensive")
    await accounting.reserve(call(accounting, max_tokens=7))
    await accounting.close()


async def test_a_runaway_loop_stops_at_the_budget_its_first_call_declared(tmp_path: Path) -> None:
    accounting = Accounting.open(local(), tmp_path)
    caller = narrow(accounting.identify(None), {"X-Run-ID": "loop", "X-Run-Max-Calls": "3"}, None, None)
    for _ in range(3):
        (await accounting.reserve(call(accounting, caller))).settle(DONE)
    error = await refused(accounting, call(accounting, caller))
    assert (error.status, error.code, error.should_retry) == (429, "run_budget_exceeded", False)
    undeclared = narrow(accounting.identify(None), {"X-Run-ID": "loop"}, None, None)
    assert (await refused(accounting, call(accounting, undeclared))).code == "run_budget_exceeded"
    raised = narrow(accounting.identify(None), {"X-Run-ID": "loop", "X-Run-Max-Calls": "9"}, None, None)
    assert (await refused(accounting, call(accounting, raised))).code == "run_budget_changed"
    await accounting.close()
    again = Accounting.open(local(), tmp_path)
    assert (await refused(again, call(again, undeclared))).code == "run_budget_exceeded"
    await again.close()


async def test_a_keys_run_budget_bounds_what_a_run_may_declare(tmp_path: Path) -> None:
    config = Config(keys={"web": keyed(run=RunConfig(require_id=True, max_spend=50e-6))}, prices=PRICES)
    accounting = Accounting.open(config, tmp_path)
    me = accounting.identify("Bearer one")
    assert (await refused(accounting, call(accounting, me))).code == "run_id_required"
    generous = narrow(me, {"X-Run-ID": "a", "X-Run-Max-Spend": "100"}, None, None)
    for _ in range(2):
        await accounting.reserve(call(accounting, generous))
    assert (await refused(accounting, call(accounting, generous))).code == "run_budget_exceeded"
    await accounting.reserve(call(accounting, narrow(me, {"X-Run-ID": "b"}, None, None)))
    await accounting.close()


@pytest.mark.parametrize(("repeats", "stopped"), [("refuse", True), ("warn", False), ("off", False)])
async def test_the_same_prompt_without_a_run_id_is_noticed(tmp_path: Path, repeats: Any, stopped: bool) -> None:
    alerts: list[dict[str, object]] = []

    async def send(alert: dict[str, object]) -> None:
        alerts.append(alert)

    config = Config(loops=LoopsConfig(repeats=repeats, repeat_limit=3))
    accounting = Accounting.open(config, tmp_path, send_alert=send)
    same = [(1, 2, 3)]
    for _ in range(3):
        await accounting.reserve(call(accounting, prompts=same))
    if stopped:
        error = await refused(accounting, call(accounting, prompts=same))
        assert (error.status, error.code, error.should_retry) == (429, "loop_detected", False)
    else:
        for _ in range(5):
            await accounting.reserve(call(accounting, prompts=same))
    await accounting.reserve(call(accounting, prompts=[(1, 2), (3,)]))
    with_run = narrow(accounting.identify(None), {"X-Run-ID": "r"}, None, None)
    for _ in range(5):
        await accounting.reserve(call(accounting, with_run, prompts=same))
    await accounting.close()
    assert [a["kind"] for a in alerts] == ([] if repeats == "off" else ["loop"])


@pytest.mark.parametrize(("repeats", "run", "read"), [("warn", "", True), ("warn", "r", False), ("off", "", False)])
async def test_prompts_are_read_only_where_repeats_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeats: Any, run: str, read: bool
) -> None:
    digested: list[object] = []

    def watched(prompts: Sequence[Sequence[int]]) -> bytes:
        digested.append(prompts)
        return prompt_digest(prompts)

    monkeypatch.setattr("minserve.economics.loops.prompt_digest", watched)
    accounting = Accounting.open(Config(loops=LoopsConfig(repeats=repeats)), tmp_path)
    caller = narrow(accounting.identify(None), {"X-Run-ID": run}, None, None)
    await accounting.reserve(call(accounting, caller, prompts=[(1, 2)]))
    assert digested == [[(1, 2)]] * read
    await accounting.close()


def test_a_digest_tells_prompts_apart() -> None:
    prompts: list[list[tuple[int, ...]]] = [
        [(1, 2, 3)],
        [(1, 2), (3,)],
        [(1,), (2, 3)],
        [(1, 2), (3,), ()],
        [(3, 2, 1)],
    ]
    assert len({prompt_digest(each) for each in prompts}) == len(prompts)
    assert prompt_digest([[1, 2]]) == prompt_digest([(1, 2)])


async def test_the_servers_limit_refuses_and_alerts_once_per_threshold(tmp_path: Path) -> None:
    alerts: list[dict[str, object]] = []

    async def send(alert: dict[str, object]) -> None:
        alerts.append(alert)

    config = Config(prices=PRICES, spend=SpendConfig(limit=110e-6))
    accounting = Accounting.open(config, tmp_path, send_alert=send)
    for _ in range(8):  # 11 millionths each, 25 reserved
        (await accounting.reserve(call(accounting))).settle(DONE)
    error = await refused(accounting, call(accounting))
    assert (error.status, error.code, error.should_retry) == (429, "server_budget_exceeded", False)
    assert (await refused(accounting, call(accounting))).code == "server_budget_exceeded"
    await accounting.close()
    values = [a["values"] for a in alerts]
    assert [v["threshold"] for v in values if isinstance(v, dict)] == [0.5, 0.8, 1.0]
    again = Accounting.open(config, tmp_path, send_alert=send)
    (await again.reserve(call(again, prompt_tokens=1, max_tokens=1))).settle(Settlement(finish="stop", status=200))
    await again.close()
    assert len(alerts) == 3


async def test_alerts_begin_anew_with_a_reset_whatever_runs_meanwhile(tmp_path: Path) -> None:
    shares: list[object] = []

    async def send(alert: dict[str, Any]) -> None:
        shares.append(alert["values"]["threshold"])

    config = Config(prices=PRICES, spend=SpendConfig(limit=110e-6))
    accounting = Accounting.open(config, tmp_path, send_alert=send)
    running = [await accounting.reserve(call(accounting)) for _ in range(4)]  # 25 millionths each
    await refused(accounting, call(accounting))
    assert accounting.reset(Scope("server"))
    for _ in range(5):  # 11 each
        (await accounting.reserve(call(accounting))).settle(DONE)
    assert accounting.spent_share == 0.5
    for reservation in running:  # forgiven
        reservation.settle(DONE)
    assert accounting.spent_share == 0.5
    assert accounting.reset(Scope("server"))
    for _ in range(4):
        await accounting.reserve(call(accounting))
    await refused(accounting, call(accounting))
    await accounting.close()
    assert shares == [1.0, 0.5, 1.0]


async def test_a_page_token_has_its_own_cap_that_survives_a_restart(tmp_path: Path) -> None:
    config = Config(keys={"web": keyed()})
    accounting = Accounting.open(config, tmp_path)
    origin = "https://a.example"
    issued = accounting.keys.issue(
        accounting.identify("Bearer one"), origin=origin, ttl_s=600, max_tokens=20, now=accounting.clock()
    )
    page = accounting.identify(f"Bearer {issued}", origin)
    (await accounting.reserve(call(accounting, page))).settle(DONE)
    assert (await refused(accounting, call(accounting, page))).code == "budget_exceeded"
    await accounting.close()
    again = Accounting.open(config, tmp_path)
    page = again.identify(f"Bearer {issued}", origin)
    assert (await refused(again, call(again, page))).code == "budget_exceeded"
    await again.reserve(call(again, page, max_tokens=7))
    await again.close()


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
