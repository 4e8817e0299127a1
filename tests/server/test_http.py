"""Whatever goes wrong has a JSON body with the right status, and repeats nothing of what came."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from minserve.config import LimitsConfig
from tests.server.http import error, raw, raw_answer
from tests.server.serving import CHAT, COMPLETION, Server, serving


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
    assert f"\r\nContent-Length: {len(body)}\r\n".encode() in head
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
