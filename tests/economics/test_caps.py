"""Caps: whose they are, whatever a request says of itself, and what a refusal says."""

from __future__ import annotations

import asyncio
from pathlib import Path

from minserve.config import Config, KeyConfig, LimitConfig, UserConfig
from minserve.economics.accounting import Accounting
from minserve.economics.keys import digest, narrow
from minserve.economics.reservation import Reservation
from tests.economics.calls import DONE, call, day, keyed, local, refused


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
