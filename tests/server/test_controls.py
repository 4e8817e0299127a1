"""The five controls, end to end: the unchanged openai package against the real engine.

Each control refuses with its status, code, message and headers before anything is computed: the prefill counters of
/metrics do not move.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from minserve.config import (
    AccountConfig,
    KeyConfig,
    LimitConfig,
    LimitsConfig,
    LoopsConfig,
    PricesConfig,
    RunConfig,
    SpendConfig,
    UserConfig,
)
from tests.server.fakes import MODEL, Server, keyed
from tests.server.real import real_server

PRICES = PricesConfig(prefill=100.0, decode=100.0)  # a token costs 0.0001
VOCABULARY = 261
NOW = 1_800_000_010.0  # 2027-01-15 08:00:10 UTC
ROOT = keyed("root", user="root", admin=True)


class Caller:
    """A server and the openai client of one key."""

    def __init__(self, server: Server, client: openai.AsyncOpenAI) -> None:
        self.server = server
        self.client = client

    def ask(self, prompt: str = "Hi", tokens: int = 4, **more: Any) -> Awaitable[Any]:
        """Two prompt tokens and four more unless said otherwise: all of them, whatever the model says."""
        extra = {"ignore_eos": True, **more.pop("extra", {})}
        return self.client.completions.create(model=MODEL, prompt=prompt, max_tokens=tokens, extra_body=extra, **more)

    async def chat(self, text: str, **more: Any) -> Any:
        return await self.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], **more
        )

    async def refused(self, call: Awaitable[Any], status: int, code: str) -> openai.APIStatusError:
        """The error of a call that must be refused, with nothing computed for it and one row of its own."""
        await self.server.settled()
        before, rows = await self.computed(), len(self.server.rows)
        with pytest.raises(openai.APIStatusError) as caught:
            await call
        assert (caught.value.status_code, caught.value.code) == (status, code)
        assert await self.computed() == before
        (row,) = self.server.rows[rows:]
        assert (row.finish, row.status, row.code, row.cost, row.prompt_tokens) == ("refused", status, code, 0, 0)
        return caught.value

    async def computed(self) -> tuple[float, float]:
        """(prompt tokens that were billed, tokens of all steps) so far, as /metrics says."""
        admin = {"Authorization": "Bearer root"}
        async with self.server.session.get(self.server.url + "/metrics", headers=admin) as response:
            page = await response.text()
        return tuple(  # type: ignore[return-value]
            sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE))
            for name in ("vllm:prompt_tokens_total", "vllm:iteration_tokens_total_sum")
        )


@asynccontextmanager
async def calling(key: KeyConfig | None = None, **sections: Any) -> AsyncIterator[Caller]:
    keys = {"a": key or keyed("secret"), "root": ROOT, **sections.pop("keys", {})}
    async with real_server(keys=keys, **sections) as (server, _), sdk(server, "secret") as client:
        server.services.accounting.clock = lambda: NOW  # so that no period ends within a test
        yield Caller(server, client)


def sdk(server: Server, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=key)


def of(caller: Caller, secret: str) -> Caller:
    """The same server with another key."""
    return Caller(caller.server, caller.client.with_options(api_key=secret))


# -- 1. caps per key and user


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


# -- 2. the most output, on every call


async def test_every_call_has_a_bound_on_its_output() -> None:
    limits = LimitsConfig(default_max_tokens=5, default_completion_tokens=3, max_tokens=8)
    async with calling(limits=limits) as caller:
        assert (await caller.chat("Hi", extra_body={"ignore_eos": True})).usage.completion_tokens == 5
        whole = await caller.client.completions.create(model=MODEL, prompt="Hi", extra_body={"ignore_eos": True})
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 3
        greedy = await caller.ask(tokens=10**6)
        assert (greedy.usage.completion_tokens, greedy.choices[0].finish_reason) == (8, "length")
        assert (await caller.ask(tokens=100, n=3)).usage.completion_tokens == 24
        assert [row.max_tokens for row in caller.server.rows] == [5, 3, 8, 24]
        assert [row.asked_max_tokens for row in caller.server.rows] == [None, None, 10**6, 300]


@pytest.mark.parametrize("stream", [False, True])
async def test_whoever_asks_for_more_output_than_there_may_be_is_told(stream: bool) -> None:
    async with calling(limits=LimitsConfig(max_tokens=8)) as caller:
        create = caller.client.completions.with_raw_response.create
        for tokens, told in ((100, "8"), (9, "8"), (8, None), (openai.omit, None)):
            reply = await create(model=MODEL, prompt="Hi", max_tokens=tokens, stream=stream)
            assert reply.headers.get("x-minserve-max-tokens") == told
            await reply.http_response.aread()


# -- 3. the most input, in stages


@pytest.mark.parametrize(
    ("characters", "status", "code"),
    [
        (3000, 413, "body_too_large"),
        (1000, 400, "input_too_long"),
        (200, 400, "too_many_input_tokens"),
        (90, 400, "call_too_expensive"),
        (40, 200, None),
    ],
)
@pytest.mark.parametrize("chat", [True, False])
async def test_input_is_bounded_in_bytes_characters_tokens_and_price(
    chat: bool, characters: int, status: int, code: str | None
) -> None:
    limits = LimitsConfig(max_body_bytes=2000, max_input_chars=500, max_input_tokens=150)
    key = keyed("secret", max_call_cost=0.0099)  # 99 tokens
    async with calling(key, limits=limits, prices=PRICES) as caller:
        text = "x" * characters
        call = caller.chat(text, max_tokens=2) if chat else caller.ask(text, tokens=10)
        if code is None:
            await call
        else:
            error = await caller.refused(call, status, code)
            assert "x-minserve-cost" not in error.response.headers
            assert error.response.headers.get("retry-after") is None


# -- 4. loops


async def test_a_runaway_loop_stops_at_the_budget_its_first_call_declared() -> None:
    async with calling(prices=PRICES) as caller:
        run: dict[str, Any] = {"extra_headers": {"X-Run-ID": "agent-1", "X-Run-Max-Calls": "5"}}

        async def runaway() -> None:
            for call in itertools.count():
                await caller.ask(f"step {call}", **run)

        with pytest.raises(openai.RateLimitError) as stopped:
            await runaway()
        assert stopped.value.code == "run_budget_exceeded"
        assert stopped.value.response.headers["x-should-retry"] == "false"
        assert [row.finish for row in caller.server.rows] == ["length"] * 5 + ["refused"]
        await caller.refused(caller.ask(extra_headers={"X-Run-ID": "agent-1"}), 429, "run_budget_exceeded")
        await caller.ask(extra_headers={"X-Run-ID": "agent-2"})
        assert [row.run for row in caller.server.rows] == ["agent-1"] * 7 + ["agent-2"]


async def test_a_runs_money_is_bounded_too_and_its_budget_can_not_be_raised() -> None:
    async with calling(prices=PRICES) as caller:
        first = {"metadata": {"run_id": "r", "run_max_spend": "0.0015"}}
        await caller.ask(extra=first)
        await caller.ask(extra={"metadata": {"run_id": "r"}})
        await caller.refused(caller.ask(extra={"metadata": {"run_id": "r"}}), 429, "run_budget_exceeded")
        raised = {"metadata": {"run_id": "r", "run_max_spend": "5"}}
        await caller.refused(caller.ask(extra=raised), 400, "run_budget_changed")


async def test_a_key_can_bound_every_run_and_want_one_named() -> None:
    key = keyed("secret", run=RunConfig(require_id=True, max_calls=2))
    async with calling(key) as caller:
        error = await caller.refused(caller.ask(), 400, "run_id_required")
        assert "X-Run-ID" in error.message
        run: dict[str, Any] = {
            "extra_headers": {"X-Run-ID": "r", "X-Run-Max-Calls": "100"}
        }  # asking for more changes nothing
        await caller.ask(**run)
        await caller.ask(**run)
        await caller.refused(caller.ask(**run), 429, "run_budget_exceeded")


async def test_a_run_of_many_calls_at_once_stops_at_its_budget_too() -> None:
    key = keyed("secret", run=RunConfig(max_calls=4))
    async with calling(key) as caller:
        run: dict[str, Any] = {"extra_headers": {"X-Run-ID": "r"}}
        replies = await asyncio.gather(*(caller.ask(**run) for _ in range(20)), return_exceptions=True)
        assert sum(not isinstance(reply, BaseException) for reply in replies) == 4


async def test_the_same_prompt_again_and_again_without_a_run_is_a_loop() -> None:
    loops = LoopsConfig(repeats="refuse", repeat_limit=3, repeat_window_s=30)
    async with calling(loops=loops) as caller:
        for _ in range(3):
            await caller.ask("again")
        error = await caller.refused(caller.ask("again"), 429, "loop_detected")
        assert error.response.headers["x-should-retry"] == "false"
        assert error.response.headers["retry-after"] == "30"
        await caller.ask("something else")
        await caller.ask("again", extra_headers={"X-Run-ID": "r"})


# -- 5. the server's own limit


async def test_the_servers_spending_limit_stops_everybody_and_alerts_on_the_way() -> None:
    told: list[Any] = []

    async def send(alert: dict[str, Any]) -> None:
        told.append(alert["values"]["threshold"])

    spend = SpendConfig(limit=0.003, period="day")  # 30 tokens: five calls
    async with calling(prices=PRICES, spend=spend, keys={"b": keyed("other", user="bea")}) as caller:
        caller.server.services.accounting.alerts._send = send
        other = of(caller, "other")
        for each in (caller, other, caller, other, caller):
            await each.ask()
        for each in (caller, other):
            error = await each.refused(each.ask(), 429, "server_budget_exceeded")
            assert error.response.headers["x-should-retry"] == "false"
            assert error.response.headers["retry-after"] == "57590"
            assert "The server's spending limit" in error.message
        assert told == [0.5, 0.8, 1.0]


async def test_a_call_that_could_cost_more_than_is_left_is_refused_before_it_runs() -> None:
    async with calling(prices=PRICES, spend=SpendConfig(limit=0.003)) as caller:
        await caller.ask()
        await caller.refused(caller.ask(tokens=100), 429, "server_budget_exceeded")
        await caller.ask()


async def test_without_keys_the_controls_hold_for_the_one_local_user() -> None:
    local = AccountConfig(limits=(LimitConfig(period="day", requests=1),))
    async with real_server(local=local) as (server, _), sdk(server, "any") as client:
        caller = Caller(server, client)
        await caller.ask()
        await caller.refused(caller.ask(), 429, "budget_exceeded")


# -- the row of a refusal


async def test_the_row_of_a_refused_call_says_who_asked_for_what() -> None:
    async with calling(limits=LimitsConfig(max_input_tokens=4)) as caller:
        with pytest.raises(openai.BadRequestError):
            await caller.client.completions.create(
                model=MODEL,
                prompt="one two three four five six",
                max_tokens=7,
                n=2,
                user="bob",
                extra_headers={"X-Feature": "fx", "X-Run-ID": "rr"},
            )
        row = caller.server.rows[-1]
    assert (row.code, row.feature, row.run, row.end_user) == ("too_many_input_tokens", "fx", "rr", "bob")
    assert (row.asked_prompt > 4, row.max_tokens, row.asked_max_tokens, row.cost) == (True, 14, 14, 0)
