"""Control 1: caps on requests, tokens and money, per key, user and end user."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from minserve.config import AccountConfig, LimitConfig, UserConfig
from tests.server.controls.caller import PRICES, Caller, calling, of, sdk
from tests.server.real import real_server
from tests.server.serving import MODEL, keyed

VOCABULARY = 261


@pytest.mark.parametrize(
    ("limit", "code", "retries"),
    [
        (LimitConfig(period="minute", requests=2), "rate_limit_exceeded", None),
        (LimitConfig(period="minute", rolling=True, tokens=12), "rate_limit_exceeded", None),
        (LimitConfig(period="day", requests=2), "budget_exceeded", "false"),
        (LimitConfig(period="day", rolling=True, tokens=15), "budget_exceeded", "false"),
        (LimitConfig(period="month", money=0.0015), "budget_exceeded", "false"),
    ],
)
@pytest.mark.parametrize("payer", ["key", "user", "end_user"])
async def test_caps_on_requests_tokens_and_money(
    payer: str, limit: LimitConfig, code: str, retries: str | None
) -> None:
    key = {"key": {"limits": (limit,)}, "end_user": {"end_user_limits": (limit,)}}.get(payer, {})
    users = {"ann": UserConfig(limits=(limit,))} if payer == "user" else {}
    more = {"second": keyed("second")} if payer == "user" else {}  # another key of the same user
    async with calling(keyed("secret", **key), users=users, keys=more, prices=PRICES) as caller:
        caller.client = caller.client.with_options(max_retries=0)
        await caller.ask(user="bob")
        other = of(caller, "second") if payer == "user" else caller
        await other.ask(user="bob")
        error = await caller.refused(caller.ask(user="bob"), 429, code)
        assert isinstance(error, openai.RateLimitError)
        headers = error.response.headers
        assert headers.get("x-should-retry") == retries
        to_come = {"minute": 50, "day": 57590, "month": 1439990}[limit.period]  # the rest of the calendar's period
        rolling = {"minute": 60, "day": 86400}.get(limit.period)  # never more than the window
        assert int(headers["retry-after"]) == (rolling if limit.rolling else to_come)
        for kind, cap in (("requests", limit.requests), ("tokens", limit.tokens)):
            assert headers.get(f"x-ratelimit-limit-{kind}") == (None if cap is None else str(cap))
            if cap is not None:
                assert int(headers[f"x-ratelimit-remaining-{kind}"]) < 6  # no room for another call
        assert {"key": "This API key", "user": "This account", "end_user": "This user"}[payer] in error.message
        if payer == "end_user":
            await caller.ask(user="eve")


async def test_the_headers_say_what_is_left() -> None:
    limits = (LimitConfig(period="minute", requests=10, tokens=100), LimitConfig(period="day", requests=3))
    async with calling(keyed("secret", limits=limits), prices=PRICES) as caller:
        reply = await caller.client.completions.with_raw_response.create(
            model=MODEL, prompt="Hi", max_tokens=4, extra_body={"ignore_eos": True}
        )
        headers = reply.headers
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("3", "2")
        assert (headers["x-ratelimit-limit-tokens"], headers["x-ratelimit-remaining-tokens"]) == ("100", "94")
        assert (headers["x-ratelimit-reset-requests"], headers["x-ratelimit-reset-tokens"]) == ("15h59m50s", "50s")
        assert headers["x-minserve-cost"] == "0.0006"


async def test_an_exhausted_budget_is_not_tried_again_by_the_sdk() -> None:
    async with calling(keyed("secret", limits=(LimitConfig(period="day", requests=0),))) as caller:
        await caller.refused(caller.ask(), 429, "budget_exceeded")  # `refused` also counts the rows: one


async def test_what_a_call_did_not_use_comes_back() -> None:
    key = keyed("secret", limits=(LimitConfig(period="day", tokens=130),))
    async with calling(key) as caller:
        stop: dict[str, Any] = {"extra": {"ignore_eos": False, "stop_token_ids": list(range(VOCABULARY))}}
        for _ in range(10):  # each reserves 92 tokens, and the first one ends it
            assert (await caller.ask(tokens=90, **stop)).usage.total_tokens == 3
            await caller.server.settled()


# bug: 66
@pytest.mark.parametrize("stream", [False, True])
async def test_fifty_calls_at_once_against_a_budget_for_two_admit_two(stream: bool) -> None:
    key = keyed("secret", limits=(LimitConfig(period="day", tokens=13),))
    async with calling(key) as caller:
        replies = await asyncio.gather(*(caller.ask(stream=stream) for _ in range(50)), return_exceptions=True)
        refused = [reply for reply in replies if isinstance(reply, openai.RateLimitError)]
        assert len(refused) == 48
        assert {error.code for error in refused} == {"budget_exceeded"}
        for reply in replies:
            if stream and not isinstance(reply, BaseException):
                assert [chunk async for chunk in reply]
        await caller.server.settled()
        assert sorted(row.finish for row in caller.server.rows) == ["length"] * 2 + ["refused"] * 48
        assert (await caller.computed())[0] == 4


# bug: 66
async def test_a_new_users_first_calls_race_for_one_budget() -> None:
    key = keyed("secret", end_user_limits=(LimitConfig(period="day", requests=3),))
    async with calling(key) as caller:
        replies = await asyncio.gather(*(caller.ask(user="new") for _ in range(8)), return_exceptions=True)
        assert sum(not isinstance(reply, BaseException) for reply in replies) == 3


async def test_without_keys_the_controls_hold_for_the_one_local_user() -> None:
    local = AccountConfig(limits=(LimitConfig(period="day", requests=1),))
    async with real_server(local=local) as (server, _), sdk(server, "any") as client:
        caller = Caller(server, client)
        await caller.ask()
        await caller.refused(caller.ask(), 429, "budget_exceeded")
