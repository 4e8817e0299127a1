"""What gives way under load, over HTTP: in its order, visible in header, metric and ledger row, and taken back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec import structs

from minserve.config import (
    AccountConfig,
    Config,
    DegradationConfig,
    LimitConfig,
    PoolConfig,
    PoolsConfig,
    PricesConfig,
    SpendConfig,
)
from minserve.request import FinishReason, Pool, RequestError, RequestOutcome, StepRecord
from minserve.server.degradation import Degradation
from minserve.text.template import ChatTemplate
from tests.server.fakes import CHAT, COMPLETION, FakeEngine, Server, say, serving, tiny_model, token
from tests.server.real import SMALL, real_server
from tests.server.test_reasoning import THINKS

TEXT = "We are very busy. Opening hours: 9 to 5."
LADDER = DegradationConfig(enabled=True, shrink_to=4, texts={"faq": TEXT}, message="Too much to do, sorry.")
POOLS = PoolsConfig(interactive=PoolConfig(max_queue=10), bulk=PoolConfig())
EVERYBODY = AccountConfig(pools=("bulk",), allow_shrink=True)
FAQ = {"X-Feature": "faq"}


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(FakeEngine(say("A long answer")), degradation=LADDER, pools=POOLS, local=EVERYBODY) as server:
        yield server


def count(server: Server, step: str) -> float:
    labels = {"model_name": "tiny", "step": step}
    return server.services.telemetry.metrics.registry.get_sample_value("minserve_degraded_requests_total", labels) or 0


def step(server: Server) -> float | None:
    registry = server.services.telemetry.metrics.registry
    return registry.get_sample_value("minserve_degradation_step", {"model_name": "tiny"})


async def test_without_load_nothing_is_cut(server: Server) -> None:
    async with server.session.post(server.url + "/v1/completions", json=COMPLETION) as response:
        assert "x-minserve-degraded" not in response.headers
        assert (await response.json())["choices"][0]["text"] == "A long answer"
    assert server.rows[0].degraded == ""
    assert step(server) == 0


async def test_it_is_off_by_default() -> None:
    async with serving(FakeEngine(say("ok")), pools=POOLS, local=EVERYBODY) as server:
        server.engine.waiting = 10
        assert (await server.post("/v1/completions", {**COMPLETION, "pool": "bulk"}))[0] == 200
        assert step(server) is None
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
    assert step(server) == 1


async def test_answers_of_others_stay_as_they_were_asked_for() -> None:
    async with serving(FakeEngine(say("A long answer")), degradation=LADDER, pools=POOLS) as server:
        server.engine.waiting = 5
        async with server.session.post(server.url + "/v1/completions", json=COMPLETION) as response:
            assert "x-minserve-degraded" not in response.headers
        assert server.engine.submissions[0].params.max_tokens == 16


async def test_then_bulk_is_paused_and_comes_back_when_there_is_room(server: Server) -> None:
    server.engine.waiting, server.engine.seconds = 7, 12.5
    async with server.session.post(server.url + "/v1/completions", json={**COMPLETION, "pool": "bulk"}) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "13")
        assert response.headers["x-minserve-degraded"] == "pause_bulk"
        assert (await response.json())["error"]["code"] == "bulk_paused"
    (row,) = server.rows
    assert (row.finish, row.status, row.code, row.degraded) == ("refused", 503, "bulk_paused", "pause_bulk")
    assert count(server, "pause_bulk") == 1
    assert server.engine.paused() == {Pool.BULK}
    assert (await server.post("/v1/completions", COMPLETION))[0] == 200

    server.engine.waiting, server.engine.seconds = 0, 0.0
    await asyncio.sleep(0.11)
    assert server.engine.paused() == frozenset()  # though nobody called since
    assert (await server.post("/v1/completions", {**COMPLETION, "pool": "bulk"}))[0] == 200


@pytest.mark.parametrize("pool", ["bulk", "interactive"])
@pytest.mark.parametrize("stream", [False, True])
async def test_bulk_that_stood_still_for_a_while_says_so(pool: str, stream: bool) -> None:
    engine = FakeEngine(None)
    async with serving(engine, degradation=LADDER, pools=POOLS, local=EVERYBODY) as server:
        body = {**COMPLETION, "pool": pool, "stream": stream}
        calling = asyncio.create_task(server.session.post(server.url + "/v1/completions", json=body))
        opened = await engine.stream()
        await stand_still(engine)
        opened.push(*say("Hi")(opened.submission)[-1])
        async with await calling as response:
            await response.read()
            told = response.headers.get("x-minserve-degraded")
        paused = "pause_bulk" if pool == "bulk" else ""
        assert (told or "") == ("" if stream else paused)  # a stream's headers had left before
        assert [(row.status, row.degraded) for row in server.rows] == [(200, paused)]
        assert count(server, "pause_bulk") == (pool == "bulk")
        engine.script = say("Hi")
        await server.post("/v1/completions", {**COMPLETION, "pool": pool})
        assert server.rows[-1].degraded == ""


async def test_a_stream_is_told_each_time_that_it_stands_still(server: Server) -> None:
    engine = server.engine
    engine.script = None
    reading = asyncio.create_task(server.events("/v1/completions", {**COMPLETION, "pool": "bulk"}))
    opened = await engine.stream()
    for text in "Hi":
        await stand_still(engine, 0.4)
        opened.push(token(0, text, opened.submission))
        await asyncio.sleep(0.05)
    opened.push(*say("")(opened.submission)[-1])
    said = await reading
    assert [line for line in said.split("\n\n") if line == ": paused"] == [": paused"] * 2
    assert said.index(": paused") < said.index('"text":"H"') < said.rindex(": paused") < said.index('"text":"i"')


async def test_a_call_that_is_cut_twice_says_both(server: Server) -> None:
    engine = server.engine
    engine.script, engine.waiting = None, 5
    body = {**COMPLETION, "pool": "bulk", "max_tokens": 100}
    calling = asyncio.create_task(server.session.post(server.url + "/v1/completions", json=body))
    opened = await engine.stream()
    await stand_still(engine)
    opened.push(*say("Hi")(opened.submission)[-1])
    async with await calling as response:
        assert (response.status, response.headers["x-minserve-degraded"]) == (200, "shrink,pause_bulk")
    assert [row.degraded for row in server.rows] == ["shrink,pause_bulk"]
    assert (count(server, "shrink"), count(server, "pause_bulk")) == (1, 1)


async def test_bulk_that_is_given_up_while_it_stands_still_says_so() -> None:
    engine = FakeEngine(None)
    async with serving(engine, degradation=LADDER, pools=POOLS, local=EVERYBODY) as server:
        body = {**COMPLETION, "pool": "bulk"}
        calling = asyncio.create_task(server.session.post(server.url + "/v1/completions", json=body))
        opened = await engine.stream()
        await stand_still(engine)
        late = RequestError("Waited too long.", status=503, code="queue_timeout", retry_after=2.5)
        opened.end(FinishReason.ERROR, late)
        async with await calling as response:
            assert (response.status, response.headers["x-minserve-degraded"]) == (503, "pause_bulk")
        assert late.degraded == ""  # an error may be many calls'
        assert (server.rows[0].code, server.rows[0].degraded) == ("queue_timeout", "pause_bulk")


async def test_a_stream_that_waits_in_a_short_queue_says_in_its_header_that_it_stood_still() -> None:
    engine, pools = FakeEngine(None), structs.replace(POOLS, bulk=PoolConfig(queue_timeout_s=5.0))
    async with serving(engine, degradation=LADDER, pools=pools, local=EVERYBODY) as server:
        body = {**COMPLETION, "pool": "bulk", "stream": True}
        calling = asyncio.create_task(server.session.post(server.url + "/v1/completions", json=body))
        opened = await engine.stream()
        await stand_still(engine)
        opened.push(*say("Hi")(opened.submission)[-1])
        async with await calling as response:
            assert (response.status, response.headers["x-minserve-degraded"]) == (200, "pause_bulk")


async def stand_still(engine: FakeEngine, seconds: float = 0.11) -> None:
    """Interactive calls queue up and leave again; the engine asks before each of its steps."""
    for waiting, paused in ((7, {Pool.BULK}), (0, frozenset())):
        engine.waiting = waiting
        await asyncio.sleep(seconds)
        assert engine.paused() == paused


async def test_a_long_wait_is_pressure_too(server: Server) -> None:
    server.engine.seconds = 0.95 * POOLS.interactive.queue_timeout_s
    await server.post("/v1/completions", COMPLETION)
    assert step(server) == 3


async def test_then_features_with_a_text_get_it_instead_of_the_model(server: Server) -> None:
    server.engine.waiting = 9
    body = {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 1}
    async with server.session.post(server.url + "/v1/chat/completions", json=body, headers=FAQ) as response:
        assert (response.status, response.headers["x-minserve-degraded"]) == (200, "static")
        reply = await response.json()
    assert [choice["message"]["content"] for choice in reply["choices"]] == [TEXT, TEXT]
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["stop", "stop"]
    assert reply["usage"]["total_tokens"] == 0
    assert not server.engine.submissions
    (row,) = server.rows
    assert (row.finish, row.status, row.degraded, row.cost, row.prompt_tokens) == ("static", 200, "static", 0, 0)
    assert row.feature == "faq"
    assert count(server, "static") == 1
    status, reply = await server.post("/v1/chat/completions", CHAT)  # another feature still gets the model
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "A lo")


async def test_a_fixed_text_counts_as_a_request() -> None:
    local = AccountConfig(limits=(LimitConfig(period="day", requests=1, tokens=5),))
    async with serving(degradation=LADDER, pools=POOLS, local=local) as server:
        server.engine.waiting = 9
        assert (await server.post("/v1/chat/completions", CHAT, headers=FAQ))[0] == 200
        status, reply = await server.post("/v1/chat/completions", CHAT, headers=FAQ)
        assert (status, reply["error"]["code"]) == (429, "budget_exceeded")
        assert [(row.finish, row.status) for row in server.rows] == [("static", 200), ("refused", 429)]


async def test_a_fixed_text_is_streamed_as_any_answer(server: Server) -> None:
    server.engine.waiting = 9
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    async with server.session.post(server.url + "/v1/chat/completions", json=body, headers=FAQ) as response:
        assert response.headers["x-minserve-degraded"] == "static"
        text = await response.text()
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data: ")]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == TEXT
    assert chunks[-1]["usage"]["total_tokens"] == 0
    assert [row.finish for row in server.rows] == ["static"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fixed_text_echoes_no_prompt(server: Server, stream: bool) -> None:
    server.engine.waiting = 9
    body = {**COMPLETION, "prompt": ["a", "b"], "echo": True, "logprobs": 2, "max_tokens": 0, "stream": stream}
    async with server.session.post(server.url + "/v1/completions", json=body, headers=FAQ) as response:
        text = await response.text()
    assert text.count(TEXT) == 2
    assert '"text":"a' not in text


async def test_a_fixed_text_is_no_thinking() -> None:
    model = tiny_model(template=ChatTemplate(THINKS, tiny_model().tokenizer))
    async with serving(model=model, degradation=LADDER, pools=POOLS) as server:
        server.engine.waiting = 9
        body = {**CHAT, "chat_template_kwargs": {"open": True}}
        status, reply = await server.post("/v1/chat/completions", body, headers=FAQ)
        message = reply["choices"][0]["message"]
        assert (status, message["content"]) == (200, TEXT)
        assert "reasoning_content" not in message


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
    assert [(alert["kind"], alert["values"]["step"]) for alert in told] == [
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


def test_a_step_that_holds_costs_no_look_at_the_queue_each_time() -> None:
    class Engine(FakeEngine):
        looks = 0

        def wait(self, pool: Pool) -> float:
            self.looks += 1
            return 0.0

    class Books:
        spent_share = 0.0

    engine, now = Engine(), 100.0
    books: Any = Books()
    held = Degradation(Config(degradation=LADDER), engine, books, clock=lambda: now)
    for _ in range(100):
        held.paused()
        now += 0.001
    assert engine.looks <= 2


async def test_running_bulk_stands_still_while_interactive_calls_queue_and_then_finishes() -> None:
    ladder = DegradationConfig(enabled=True, pause_bulk_at=0.6, static_at=3, refuse_at=3)
    pools = PoolsConfig(interactive=PoolConfig(max_queue=5, token_share=0.8, kv_share=0.7), bulk=PoolConfig())
    engine = structs.replace(SMALL, max_num_seqs=2)
    async with real_server(engine, degradation=ladder, pools=pools, local=EVERYBODY) as (server, assembly):
        begun, paused = asyncio.Event(), set[int]()

        def look(record: StepRecord | RequestOutcome) -> None:
            if isinstance(record, StepRecord) and record.running[Pool.BULK]:
                begun.set()
            if assembly.engine.paused:
                paused.update(live.output for live in server.services.engine.requests() if live.pool == "bulk")

        assembly.engine.observers.append(look)
        body = {**COMPLETION, "max_tokens": 60, "ignore_eos": True}
        bulk = asyncio.create_task(server.post("/v1/completions", {**body, "pool": "bulk"}))
        await begun.wait()
        calls = [asyncio.create_task(server.post("/v1/completions", {**body, "prompt": f"{i}"})) for i in range(6)]
        await asyncio.wait(calls)
        assert len(paused) == 1  # it stood still at one place
        assert [(await call)[0] for call in calls] == [200] * 6
        status, reply = await bulk
        assert (status, reply["usage"]["completion_tokens"]) == (200, 60)
        assert assembly.engine.paused == frozenset()
        assert {(row.pool, row.degraded) for row in server.rows} == {("bulk", "pause_bulk"), ("interactive", "")}
