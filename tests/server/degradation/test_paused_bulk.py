"""Bulk work stands still while interactive calls queue, says so, and goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import structs

from minserve.config import Config, DegradationConfig, PoolConfig, PoolsConfig
from minserve.request import FinishReason, Pool, RequestError, RequestOutcome, StepRecord
from minserve.server.degradation import Degradation
from tests.server.degradation.ladder import EVERYBODY, LADDER, POOLS, count
from tests.server.fakes import FakeEngine, say, token
from tests.server.real import SMALL, real_server
from tests.server.serving import COMPLETION, Server, serving


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


def test_a_rung_that_holds_costs_no_look_at_the_queue_each_time() -> None:
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
