"""Tokens that come late or not at all, and readers that are slow, behind a scripted engine."""

from __future__ import annotations

import asyncio
import json

from minserve.config import PoolConfig, PoolsConfig, TimeoutsConfig
from minserve.request import FinishReason, TextDelta, Usage
from tests.server.fakes import FakeEngine
from tests.server.serving import COMPLETION, serving
from tests.server.streams import STREAM, error_event, open_stream

QUICK = TimeoutsConfig(first_token_s=0.2, token_gap_s=0.2, total_s=1.0, sse_keep_alive_s=0.1)


async def test_a_first_token_that_does_not_come_is_504() -> None:
    engine = FakeEngine(None)
    async with serving(engine, timeouts=QUICK) as server:
        status, body = await server.post("/v1/completions", COMPLETION)
        assert (status, body["error"]["code"]) == (504, "first_token_timeout")
        assert error_event(await (await open_stream(server)).text())["code"] == "first_token_timeout"
        await server.settled()
        assert not engine.streams
        assert [row.status for row in server.rows] == [504, 504]


async def test_a_gap_between_tokens_and_the_whole_time_are_bounded() -> None:
    engine = FakeEngine(None)
    async with serving(engine, timeouts=QUICK) as server:
        task = asyncio.create_task(server.post("/v1/completions", COMPLETION))
        (await engine.stream()).push(TextDelta(0, "a", (97,)))
        status, body = await task
        assert (status, body["error"]["code"]) == (504, "token_gap_timeout")
        engine.arrived.clear()
        response = asyncio.create_task(server.session.post(server.url + "/v1/completions", json=COMPLETION))
        stream = await engine.stream()
        while not response.done():
            stream.push(TextDelta(0, "a", (97,)))
            await asyncio.sleep(0.02)
        reply = await response
        assert (await reply.json())["error"]["code"] == "total_timeout"
        assert reply.headers["x-should-retry"] == "false"


async def test_a_pool_can_have_its_own_timeouts() -> None:
    pools = PoolsConfig(interactive=PoolConfig(first_token_s=0.1))
    async with serving(FakeEngine(None), timeouts=TimeoutsConfig(), pools=pools) as server:
        assert (await server.post("/v1/completions", COMPLETION))[0] == 504


async def test_silence_is_broken_by_comments() -> None:
    engine = FakeEngine(None)
    timeouts = TimeoutsConfig(sse_keep_alive_s=0.05)
    async with serving(engine, timeouts=timeouts) as server:
        response = await open_stream(server)
        stream = await engine.stream()
        stream.push(TextDelta(0, "a", (97,)))
        await asyncio.sleep(0.3)
        stream.push(TextDelta(0, finish=FinishReason.STOP, usage=Usage(2, 0, 1)))
        text = await response.text()
        assert text.count(": keep-alive\n\n") >= 3
        assert text.endswith("data: [DONE]\n\n")


async def test_a_reader_that_takes_nothing_is_dropped() -> None:
    engine = FakeEngine(None)
    timeouts = TimeoutsConfig(write_stall_s=0.2)
    async with serving(engine, timeouts=timeouts) as server:
        host, port = server.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps(STREAM).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        stream = await engine.stream()
        for _ in range(200):
            if stream.done:
                break
            stream.push(TextDelta(0, "x" * 100_000, (120,)))
            await asyncio.sleep(0.02)
        await server.settled()
        assert (server.rows[0].status, server.rows[0].code, server.rows[0].finish) == (499, "write_stalled", "abort")
        writer.transport.abort()


async def test_a_slow_reader_gets_coalesced_chunks_and_misses_nothing() -> None:
    engine = FakeEngine(None)
    async with serving(engine) as server:
        response = await open_stream(server, {**STREAM, "n": 2})
        stream = await engine.stream()
        stream.push(*(TextDelta(i % 2, f"{i},") for i in range(100)))
        stream.push(*(TextDelta(k, finish=FinishReason.STOP, usage=Usage(2, 0, 50)) for k in range(2)))
        text = await response.text()
        assert text.count("data: ") == 2 + 2 + 1
        for k in range(2):
            assert "".join(f"{i}," for i in range(k, 100, 2)) in text
