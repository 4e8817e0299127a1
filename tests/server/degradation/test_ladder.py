"""What gives way under load, over HTTP: in its order, visible in header, metric and ledger row, and taken back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from minserve.config import PricesConfig, SpendConfig
from tests.server.degradation.ladder import EVERYBODY, FAQ, LADDER, POOLS, count, rung
from tests.server.fakes import FakeEngine, say
from tests.server.serving import CHAT, COMPLETION, Server, serving


async def test_without_load_nothing_is_cut(server: Server) -> None:
    async with server.session.post(server.url + "/v1/completions", json=COMPLETION) as response:
        assert "x-minserve-degraded" not in response.headers
        assert (await response.json())["choices"][0]["text"] == "A long answer"
    assert server.rows[0].degraded == ""
    assert rung(server) == 0


async def test_it_is_off_by_default() -> None:
    async with serving(FakeEngine(say("ok")), pools=POOLS, local=EVERYBODY) as server:
        server.engine.waiting = 10
        assert (await server.post("/v1/completions", {**COMPLETION, "pool": "bulk"}))[0] == 200
        assert rung(server) is None
        assert server.engine.paused() == frozenset()


@pytest.mark.parametrize("stream", [False, True])
async def test_first_the_answers_of_those_who_allow_it_get_shorter(server: Server, stream: bool) -> None:
    server.engine.waiting = 5
    body = {**COMPLETION, "max_tokens": 100, "min_tokens": 50, "n": 2, "stream": stream}
    async with server.session.post(server.url + "/v1/completions", json=body) as response:
        assert response.headers["x-minserve-degraded"] == "shrink"
        await response.read()
    (submission,) = server.engine.submissions
    assert (submission.params.max_tokens, submission.params.min_tokens) == (4, 4)
    (row,) = server.rows
    assert (row.degraded, row.max_tokens, row.finish) == ("shrink", 8, "length")
    assert count(server, "shrink") == 1
    assert rung(server) == 1


async def test_answers_of_others_stay_as_they_were_asked_for() -> None:
    async with serving(FakeEngine(say("A long answer")), degradation=LADDER, pools=POOLS) as server:
        server.engine.waiting = 5
        async with server.session.post(server.url + "/v1/completions", json=COMPLETION) as response:
            assert "x-minserve-degraded" not in response.headers
        assert server.engine.submissions[0].params.max_tokens == 16


async def test_a_long_wait_is_pressure_too(server: Server) -> None:
    server.engine.seconds = 0.95 * POOLS.interactive.queue_timeout_s
    await server.post("/v1/completions", COMPLETION)
    assert rung(server) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_last_calls_are_refused_in_the_operators_words(server: Server, stream: bool) -> None:
    server.engine.waiting, server.engine.seconds = 10, 20.0
    async with server.session.post(server.url + "/v1/chat/completions", json={**CHAT, "stream": stream}) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "20")
        assert response.headers["x-minserve-degraded"] == "refuse"
        error = (await response.json())["error"]
    assert (error["message"], error["code"]) == ("Too much to do, sorry.", "overloaded")
    (row,) = server.rows
    assert (row.status, row.code, row.degraded) == (503, "overloaded", "refuse")
    assert count(server, "refuse") == 1
    assert (await server.post("/v1/chat/completions", CHAT, headers=FAQ))[0] == 200  # the text is still there
    server.engine.waiting = 8
    assert (await server.post("/v1/chat/completions", CHAT))[0] == 200


async def test_a_change_is_told_once_not_with_every_call() -> None:
    told: list[dict[str, Any]] = []

    async def send(alert: dict[str, Any]) -> None:
        told.append(alert)

    async with serving(degradation=LADDER, pools=POOLS) as server:
        server.services.accounting.alerts._send = send
        for waiting in (5, 5, 6, 0, 5, 9):
            server.engine.waiting = waiting
            await server.post("/v1/completions", COMPLETION)
        await asyncio.sleep(0.05)
    assert [(alert["kind"], alert["values"]["rung"]) for alert in told] == [
        ("degraded", "shrink"),
        ("degraded", "static"),
    ]


async def test_money_is_saved_in_the_same_order_until_the_limit_itself_refuses() -> None:
    prices = PricesConfig(decode=100.0)  # a token costs 0.0001
    spend = SpendConfig(limit=0.002)  # 20 tokens
    sections: dict[str, Any] = {"prices": prices, "spend": spend, "degradation": LADDER, "local": EVERYBODY}
    async with serving(FakeEngine(say("x" * 12)), **sections) as server:
        server.services.accounting.clock = lambda: 1_800_000_000.0  # 16 hours to midnight, UTC

        async def ask(tokens: int, **more: Any) -> tuple[int, str | None]:
            headers = more.pop("headers", {})
            body = {**COMPLETION, "max_tokens": tokens, **more}
            async with server.session.post(server.url + "/v1/completions", json=body, headers=headers) as response:
                return response.status, response.headers.get("x-minserve-degraded")

        assert await ask(10) == (200, None)
        assert await ask(8) == (200, "shrink")  # half of it is spent, so four tokens
        async with server.session.post(server.url + "/v1/completions", json={**COMPLETION, "pool": "bulk"}) as response:
            assert (response.status, response.headers["x-minserve-degraded"]) == (503, "pause_bulk")
            assert response.headers["Retry-After"] == "57600"
            assert response.headers["x-should-retry"] == "false"
        assert server.engine.paused() == frozenset()  # who was admitted goes on
        assert await ask(5) == (200, "shrink")
        assert await ask(4, headers=FAQ) == (200, "static")
        status, reply = await server.post("/v1/completions", {**COMPLETION, "max_tokens": 4})
        assert (status, reply["error"]["code"]) == (429, "server_budget_exceeded")
