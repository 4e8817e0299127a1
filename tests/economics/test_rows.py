"""A call's row: what it says, that refused calls have one, and how many of nobody's are kept."""

from __future__ import annotations

from pathlib import Path

from minserve.config import Config
from minserve.economics.accounting import Accounting
from minserve.economics.keys import narrow
from minserve.economics.reservation import Admission
from minserve.economics.rows import Row
from minserve.economics.settlement import Settlement
from minserve.request import FinishReason, Pool, RequestError, RequestOutcome, Usage
from tests.economics.calls import PRICES, call, keyed, local, rows


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
