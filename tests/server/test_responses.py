"""What responses carry: ids, costs and limits; and what a stream's reader is told before the first token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from minserve.config import AccountConfig, LimitConfig, PoolConfig, PoolsConfig, PricesConfig, TimeoutsConfig
from minserve.request import TextDelta
from minserve.status import PromptProgress
from tests.server.fakes import FakeEngine, say
from tests.server.http import error
from tests.server.serving import COMPLETION, Server, serving


async def test_a_sane_request_id_comes_back_and_others_are_replaced(server: Server) -> None:
    for sent, same in (("job-1.a:b_c", True), ("x" * 129, False), ("a b", False), ("", False)):
        async with server.session.get(server.url + "/version", headers={"X-Request-ID": sent}) as response:
            assert (response.headers["X-Request-ID"] == sent) is same
            assert response.headers["X-Request-ID"]
    async with server.session.get(server.url + "/missing", headers={"X-Request-ID": "abc"}) as response:
        assert response.headers["X-Request-ID"] == "abc"
    for body in (COMPLETION, {**COMPLETION, "stream": True}, {**COMPLETION, "temperature": 9}):
        async with server.session.post(server.url + "/v1/completions", json=body) as response:
            await response.read()
            assert response.headers["X-Request-ID"] == server.rows[-1].id
    async with server.session.post(
        server.url + "/v1/completions", json=COMPLETION, headers={"X-Request-ID": "abc"}
    ) as response:
        assert response.headers["X-Request-ID"] == "abc"
        assert response.headers["Server"] == "minserve"


# bug: 47
async def test_stream_headers_and_first_bytes_leave_at_once() -> None:
    engine = FakeEngine(None)
    body = {**COMPLETION, "stream": True}
    async with serving(engine) as server, server.session.post(server.url + "/v1/completions", json=body) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["Cache-Control"] == "no-cache, no-transform"
        assert "Content-Length" not in response.headers
        assert "Content-Encoding" not in response.headers
        first = await asyncio.wait_for(response.content.readany(), 1)
        assert first == b": queued 0\n\n"


async def test_a_waiting_reader_sees_what_it_waits_for() -> None:
    engine = FakeEngine(None)
    async with (
        serving(engine) as server,
        server.session.post(server.url + "/v1/completions", json={**COMPLETION, "stream": True}) as response,
    ):
        stream = await engine.stream()
        stream.progress = PromptProgress("queued", 0, 2, 3)
        assert b": queued 3\n\n" in await read_until(response, b"queued 3")
        stream.progress = PromptProgress("prefill", 120, 400, 0)
        assert b": prefill 120/400\n\n" in await read_until(response, b"prefill")


@pytest.mark.parametrize("token", [True, False])
async def test_in_a_short_queue_the_status_line_waits_for_its_end(token: bool) -> None:
    engine = FakeEngine(None)
    body, pools = {**COMPLETION, "stream": True}, PoolsConfig(interactive=PoolConfig(queue_timeout_s=5.0))
    async with serving(engine, pools=pools) as server:
        calling = asyncio.create_task(server.session.post(server.url + "/v1/completions", json=body))
        stream = await engine.stream()
        await asyncio.sleep(0.4)
        assert not calling.done()
        if token:
            stream.push(TextDelta(0, "a", (97,)))
        else:
            stream.progress = PromptProgress("prefill", 1, 2, 0)
        async with await asyncio.wait_for(calling, 1) as response:
            await read_until(response, b'"text":"a"' if token else b": prefill 1/2\n\n")


async def test_the_status_line_waits_no_longer_than_a_reader_can_do_without_a_sign() -> None:
    engine = FakeEngine(None)
    pools = PoolsConfig(interactive=PoolConfig(queue_timeout_s=0.2))
    async with (  # no step ends, so the engine does not find out that the call is late
        serving(engine, pools=pools, timeouts=TimeoutsConfig(sse_keep_alive_s=0.3)) as short,
        short.session.post(short.url + "/v1/completions", json={**COMPLETION, "stream": True}) as response,
    ):
        assert b": queued 0\n\n" in await read_until(response, b"queued 0")


async def read_until(response: Any, mark: bytes) -> bytes:
    data = b""
    async with asyncio.timeout(5):
        while mark not in data:
            data += await response.content.readany()
    return data


async def test_rate_limit_headers_and_cost_come_with_answers() -> None:
    local = AccountConfig(limits=(LimitConfig(period="hour", requests=2, tokens=1000),))
    prices = PricesConfig(prefill=1.0, decode=2.0)
    async with serving(FakeEngine(say("ab")), local=local, prices=prices) as server:
        async with server.session.post(server.url + "/v1/completions", json=COMPLETION) as response:
            assert response.headers["x-ratelimit-limit-requests"] == "2"
            assert response.headers["x-ratelimit-remaining-requests"] == "1"
            assert response.headers["x-minserve-cost"] == "0.000006"
            assert response.headers["x-minserve-reserved-cost"] == "0.000034"
            assert (await response.json())["usage"]["cost"] == 0.000006
        assert (await server.post("/v1/completions", COMPLETION))[0] == 200
        async with server.session.post(server.url + "/v1/completions", json=COMPLETION) as response:
            assert response.status == 429
            assert error(429, await response.json())["code"] == "budget_exceeded"
            assert response.headers["x-should-retry"] == "false"
            assert int(response.headers["Retry-After"]) > 0
        assert len(server.engine.submissions) == 2
        assert [row.finish for row in server.rows] == ["stop", "stop", "refused"]
