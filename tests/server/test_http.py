"""Whatever goes wrong has a JSON body with the right status, and what every response carries."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from typing import Any

import pytest

from minserve.config import (
    AccountConfig,
    LimitConfig,
    LimitsConfig,
    PoolConfig,
    PoolsConfig,
    PricesConfig,
    TimeoutsConfig,
)
from minserve.engine import Progress
from minserve.request import TextDelta
from tests.server.fakes import CHAT, COMPLETION, CONTEXT, FakeEngine, Server, say, serving
from tests.server.http import error, raw, raw_answer


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Key: sec\x00ret\r\n\r\n", id="header-byte"),
        pytest.param(b"GET /health HTTP/1.1\r\nHost: localhost\r\nsecret\r\n\r\n", id="header-without-value"),
        pytest.param(b"GET /health HTTP/1.1\r\nX-Key: " + b"secret" * 2000 + b"\r\n\r\n", id="header-too-long"),
        pytest.param(b"GET /health secret/1.1\r\n\r\n", id="version"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01secret\r\n\r\n", id="tls"),
    ],
)
async def test_what_is_no_http_gets_a_json_error_too(
    server: Server, request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    head, _, body = (await raw_answer(server, request_bytes)).partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    assert b"\r\nContent-Type: application/json" in head
    assert b"\r\nServer: minserve" in head
    assert error(400, json.loads(body))["code"] == "invalid_http"
    assert b"secret" not in body
    assert "secret" not in caplog.text
    async with server.session.get(server.url + "/health") as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "route_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/static/missing.js", 404, "page_not_found"),
        ("GET", "/static/..%2Fapp.py", 404, "page_not_found"),
        ("GET", "/static/__init__.py", 404, "page_not_found"),
    ],
)
async def test_every_refusal_is_json(server: Server, method: str, path: str, status: int, code: str) -> None:
    async with server.session.request(method, server.url + path) as response:
        assert response.status == status
        assert error(status, await response.json())["code"] == code
        assert status != 405 or "POST" in response.headers["Allow"] or "GET" in response.headers["Allow"]


@pytest.mark.parametrize("path", ["/health", "/v1/completions", "/nothing"])
async def test_an_unknown_expectation_is_refused_in_json(server: Server, path: str) -> None:
    request = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nExpect: secret\r\nConnection: close\r\n\r\n"
    head, _, body = (await raw_answer(server, request.encode())).partition(b"\r\n\r\n")
    assert head.split()[1] == b"417"
    assert b"\r\nContent-Type: application/json\r\n" in head
    assert b"\r\nX-Request-ID: req-" in head
    assert error(417, json.loads(body))["code"] == "http_error"
    assert b"secret" not in body


async def test_only_json_bodies_are_read(server: Server) -> None:
    body = json.dumps(COMPLETION).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        status, reply = await server.post("/v1/completions", body, headers={"Content-Type": kind})
        assert (status, error(415, reply)["code"]) == (415, "unsupported_media_type")
    kind = "application/json; charset=utf-8"
    assert (await server.post("/v1/completions", body, headers={"Content-Type": kind}))[0] == 200


async def test_compressed_bodies_are_refused_before_they_are_unpacked(server: Server) -> None:
    bomb = gzip.compress(b" " * 10_000_000)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with server.session.post(server.url + "/v1/completions", data=bomb, headers=headers) as response:
        assert error(415, await response.json())["code"] == "unsupported_encoding"


async def test_a_body_above_the_limit_is_413() -> None:
    async with serving(limits=LimitsConfig(max_body_bytes=1000)) as server:
        status, reply = await server.post("/v1/completions", {**COMPLETION, "prompt": "x" * 2000})
        assert (status, error(413, reply)["code"]) == (413, "body_too_large")
        assert server.rows[-1].code == "body_too_large"


async def test_a_body_that_says_it_is_too_large_is_not_waited_for(server: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head + b"Content-Length: 1000000000\r\n\r\n{")
    assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == b"413"
    writer.close()
    assert server.rows[-1].code == "body_too_large"


async def test_the_stages_of_input_have_their_own_codes() -> None:
    async with serving(limits=LimitsConfig(max_input_chars=50, max_input_tokens=20)) as server:
        status, reply = await server.post("/v1/completions", {**COMPLETION, "prompt": "x" * 51})
        assert (status, error(400, reply)["code"]) == (400, "input_too_long")
        status, reply = await server.post("/v1/completions", {**COMPLETION, "prompt": "x" * 21})
        assert (status, error(400, reply)["code"]) == (400, "too_many_input_tokens")
        assert not server.engine.submissions


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": [{"role": "user", "content": "Hi", "name": "x" * 60}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "Hi", "reasoning_content": "x" * 60}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x" * 60}}]}]}, "messages"),
        ({"chat_template_kwargs": {"documents": ["x" * 60]}}, "chat_template_kwargs"),
        ({"reasoning_effort": "x" * 60}, "chat_template_kwargs"),
    ],
)
async def test_all_that_a_template_may_print_is_counted(more: dict[str, Any], param: str) -> None:
    async with serving(limits=LimitsConfig(max_input_chars=50)) as server:
        status, reply = await server.post("/v1/chat/completions", {**CHAT, **more})
        assert (status, error(400, reply)["code"], reply["error"]["param"]) == (400, "input_too_long", param)
        assert (await server.post("/v1/chat/completions", CHAT))[0] == 200


# bug: 41
async def test_a_prompt_that_fills_the_context_is_refused_with_the_true_limit(server: Server) -> None:
    status, reply = await server.post("/v1/completions", {**COMPLETION, "prompt": "x" * CONTEXT})
    assert status == 400
    assert error(400, reply)["code"] == "context_length_exceeded"
    assert f"This model's maximum context length is {CONTEXT} tokens. However, " in reply["error"]["message"]
    body = {**COMPLETION, "prompt": "x" * 8, "max_tokens": CONTEXT - 3}
    assert (await server.post("/v1/completions", body))[0] == 200
    assert server.engine.submissions[-1].params.max_tokens == CONTEXT - 8


async def test_a_validation_error_never_repeats_the_callers_input(server: Server) -> None:
    long = "very private " * 1000
    for body in (
        {**COMPLETION, "model": long},
        {**COMPLETION, "logit_bias": {long: 1}},
        {**CHAT, "messages": [{"role": long, "content": ""}]},
        {**COMPLETION, "seed": int("9" * 4000)},
    ):
        status, reply = await server.post("/v1/completions" if "prompt" in body else "/v1/chat/completions", body)
        assert status in (400, 404)
        assert len(json.dumps(reply)) < 1000


async def test_a_fault_of_ours_is_500_without_details(server: Server) -> None:
    def broken(_: object) -> Any:
        raise KeyError("secret detail")

    server.engine.submit = broken
    status, reply = await server.post("/v1/completions", COMPLETION)
    assert (status, error(500, reply)["code"]) == (500, "internal_error")
    assert "secret detail" not in json.dumps(reply)
    assert (server.rows[-1].status, server.rows[-1].finish) == (500, "refused")


async def test_what_is_no_http_is_refused_and_leaves_no_trace_in_the_log(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    for request in (
        b"GARBAGE secret-word\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: secret-word" + b"a" * 9000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: secret-word\r\n\r\n",
    ):
        assert await raw(server, request) == 400
    assert "secret-word" not in caplog.text
    assert (await server.post("/v1/completions", COMPLETION))[0] == 200


# -- what every response carries


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
        stream.progress = Progress("queued", 0, 2, 3)
        assert b": queued 3\n\n" in await read_until(response, b"queued 3")
        stream.progress = Progress("prefill", 120, 400, 0)
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
            stream.progress = Progress("prefill", 1, 2, 0)
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


async def test_a_slow_tokenizer_does_not_hold_up_health(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    tokenizer = server.services.model.tokenizer
    monkeypatch.setattr(type(tokenizer), "encode", lambda *_, **__: release.wait(10) and [72])
    slow = asyncio.create_task(server.post("/v1/completions", COMPLETION))
    await asyncio.sleep(0.05)
    started = time.monotonic()
    assert (await server.get("/health"))[0] == 200
    assert time.monotonic() - started < 1
    assert not slow.done()
    release.set()
    assert (await slow)[0] == 200
