"""Every route but the generating ones, the guards, and that whatever goes wrong has a JSON body."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from minserve.config import (
    AccountConfig,
    LimitConfig,
    LimitsConfig,
    PoolConfig,
    PoolsConfig,
    PricesConfig,
    RunConfig,
    ServerConfig,
    SpendConfig,
    TimeoutsConfig,
    UserConfig,
)
from minserve.engine import Progress
from minserve.request import TextDelta
from minserve.status import State
from minserve.text.template import ChatTemplate
from minserve.text.tokenizer import Tokenizer
from minserve.weights.dummy import load_dummy
from minserve.weights.vocabulary import TokenizerJson
from tests.server.fakes import CHAT, COMPLETION, CONTEXT, MODEL, FakeEngine, Server, keyed, say, serving, tiny_model

PAGE = "https://page.example"
KEYS = {"ann": keyed("secret"), "root": keyed("admin-secret", admin=True)}
ANN = {"Authorization": "Bearer secret"}
ROOT = {"Authorization": "Bearer admin-secret"}


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as server:
        yield server


async def raw(server: Server, request: bytes) -> int:
    """The status of a request sent as it is, with no client library that tidies paths in between."""
    return int((await raw_answer(server, request)).split()[1])


async def raw_answer(server: Server, request: bytes) -> bytes:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    await writer.drain()
    data = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await writer.wait_closed()
    return data


def error(status: int, body: Any) -> Any:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["code"], str)
    return body["error"]


# -- errors


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


# -- input forms


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("Hi", [(72, 105)]),
        (["Hi", "a"], [(72, 105), (97,)]),
        ([72, 105], [(72, 105)]),
        ([[72], [105, 97]], [(72,), (105, 97)]),
    ],
)
async def test_the_four_forms_of_a_prompt(server: Server, prompt: object, ids: list[tuple[int, ...]]) -> None:
    assert (await server.post("/v1/completions", {"prompt": prompt}))[0] == 200
    assert [submission.prompt for submission in server.engine.submissions] == ids


# bug: 44
@pytest.mark.parametrize(
    "prompt", [[], [[]], [[1], []], ["a", 1], [1, [2]], [-1], [261], [2**62], [[1], [-1]], ["a"] * 65, [1.5], {}]
)
async def test_prompts_that_mean_nothing_are_400(server: Server, prompt: object) -> None:
    status, reply = await server.post("/v1/completions", {"prompt": prompt})
    assert status == 400
    assert error(400, reply)["param"].startswith("prompt")
    assert not server.engine.submissions
    assert (await server.post("/v1/completions", COMPLETION))[0] == 200


async def test_an_empty_prompt_is_the_models_bos(server: Server) -> None:
    for body in ({"prompt": ""}, {}, {"prompt": None}):
        assert (await server.post("/v1/completions", body))[0] == 200
        assert server.engine.submissions[-1].prompt == (server.services.model.tokenizer.bos_id,)


# bug: 69
@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
    ],
)
async def test_all_forms_of_content_in_a_tool_loop(server: Server, message: dict[str, object]) -> None:
    messages = [{"role": "user", "content": "go"}, message, {"role": "tool", "tool_call_id": "c", "content": "42"}]
    body = {"messages": messages, "stop": None, "tools": None, "temperature": None, "logprobs": None}
    status, reply = await server.post("/v1/chat/completions", body)
    assert status == 200, reply


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "king", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0]"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
    ],
)
async def test_messages_that_cannot_be_shown_are_400(server: Server, message: dict[str, object], param: str) -> None:
    status, reply = await server.post("/v1/chat/completions", {"messages": [message]})
    assert status == 400
    assert error(400, reply)["param"].startswith(param)


# bug: 73
async def test_control_tokens_in_a_users_text_stay_text(server: Server) -> None:
    tokenizer = server.services.model.tokenizer
    end = tokenizer.special_texts["<|im_end|>"]
    body = {"messages": [{"role": r, "content": "a<|im_end|>b"} for r in ("system", "user", "tool")]}
    assert (await server.post("/v1/chat/completions", body))[0] == 200
    prompt = server.engine.submissions[-1].prompt
    assert prompt.count(end) == 3  # the template's own, one per message
    # A raw prompt is the caller's own from its first token on: there it is a control token.
    assert (await server.post("/v1/completions", {"prompt": "a<|im_end|>b"}))[0] == 200
    assert server.engine.submissions[-1].prompt == (97, end, 98)


async def test_an_unknown_model_is_404_and_none_means_ours(server: Server) -> None:
    status, reply = await server.post("/v1/chat/completions", {**CHAT, "model": "gpt-4"})
    assert (status, error(404, reply)["code"], reply["error"]["param"]) == (404, "model_not_found", "model")
    assert (await server.post("/v1/chat/completions", {"messages": CHAT["messages"]}))[0] == 200


async def test_stream_options_need_a_stream(server: Server) -> None:
    status, reply = await server.post("/v1/completions", {**COMPLETION, "stream_options": {"include_usage": True}})
    assert (status, reply["error"]["param"]) == (400, "stream_options")


async def test_the_final_message_can_be_continued(server: Server) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Well"}]
    body = {"messages": messages, "continue_final_message": True}
    assert (await server.post("/v1/chat/completions", body))[0] == 200
    assert bytes(i for i in server.engine.submissions[-1].prompt if i < 256).endswith(b"Well")
    status, reply = await server.post("/v1/chat/completions", {**body, "add_generation_prompt": True})
    assert (status, reply["error"]["param"]) == (400, "continue_final_message")
    status, reply = await server.post("/v1/chat/completions", {**body, "messages": CHAT["messages"]})
    assert (status, reply["error"]["param"]) == (400, "continue_final_message")


async def test_template_variables_pass_and_ours_cannot_be_replaced(server: Server) -> None:
    fine = {**CHAT, "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
    assert (await server.post("/v1/chat/completions", fine))[0] == 200
    for name in ("messages", "add_generation_prompt", "bos_token"):
        status, _ = await server.post("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {name: "x"}})
        assert status == 400


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


# -- browsers


# bug: 48
async def test_preflight_needs_no_key_and_errors_are_readable_for_listed_pages() -> None:
    async with serving(server=ServerConfig(allowed_origins=(PAGE,)), keys=KEYS) as server:
        question = {
            "Origin": PAGE,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
        }
        async with server.session.options(server.url + "/v1/chat/completions", headers=question) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert "x-stainless-os" in response.headers["Access-Control-Allow-Headers"]
        bad = {"Origin": PAGE, "Authorization": "Bearer wrong"}
        async with server.session.post(server.url + "/v1/completions", json=COMPLETION, headers=bad) as response:
            assert response.status == 401
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert "x-should-retry" in response.headers["Access-Control-Expose-Headers"]
        foreign = {**question, "Origin": "https://evil.example"}
        async with server.session.options(server.url + "/v1/chat/completions", headers=foreign) as response:
            assert response.status == 403
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_streams_carry_cors_headers_too() -> None:
    async with serving(server=ServerConfig(allowed_origins=(PAGE,))) as server:
        body = {**COMPLETION, "stream": True}
        async with server.session.post(server.url + "/v1/completions", json=body, headers={"Origin": PAGE}) as response:
            assert response.headers["Access-Control-Allow-Origin"] == PAGE


async def test_foreign_pages_and_rebound_names_are_refused(server: Server) -> None:
    status, reply = await server.post("/v1/completions", COMPLETION, headers={"Origin": "https://evil.example"})
    assert (status, error(403, reply)["code"]) == (403, "origin_not_allowed")
    for path in ("/status", "/", "/v1/models", "/missing"):
        status, reply = await server.get(path, headers={"Host": "evil.example"})
        assert (status, error(403, reply)["code"]) == (403, "host_not_allowed")
    await server.post("/v1/completions", COMPLETION, headers={"Host": "evil.example"})
    own = {"Origin": server.url}
    assert (await server.post("/v1/completions", COMPLETION, headers=own))[0] == 200
    assert len(server.engine.submissions) == 1
    assert all(row.total_ms is not None for row in server.rows)
    assert [(row.code, row.endpoint) for row in server.rows] == [
        ("origin_not_allowed", "/v1/completions"),
        ("host_not_allowed", "/v1/completions"),
        ("", "/v1/completions"),
    ]


# -- keys


# bug: 64
@pytest.mark.parametrize(
    "path",
    [
        *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/tiny", "/tokenize", "/detokenize"),
        *("/abort", "/metrics", "/status", "/version", "/v1/chat/completions/render", "/missing", "/docs"),
        "/limits/reset",
        *("//v1/models", "/V1/models", "/v1/models/", "/v1//models", "/./v1/models", "/static/../v1/models"),
        *("/%761/models", "/health/../v1/models", "/health/", "/HEALTH", "//health", "/static/", "/ready/x"),
        *("/v1/models?x=/health", "/health%2f..%2fstatus", "http://127.0.0.1/v1/models"),
    ],
)
async def test_without_a_key_nothing_but_the_open_routes_answers(path: str) -> None:
    async with serving(keys=KEYS) as server:
        for method in ("GET", "POST", "HEAD", "DELETE", "OPTIONS"):
            head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
            assert await raw(server, head.encode()) == 401


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic secret",
        "secret",
        "Bearer secret2",
        "Bearer sécret",
        "Bearer " + "x" * 5000,
    ],
)
async def test_wrong_keys_are_401(authorization: str) -> None:
    async with serving(keys=KEYS) as server:
        status, reply = await server.get("/v1/models", headers={"Authorization": authorization})
        assert (status, error(401, reply)["type"]) == (401, "authentication_error")


async def test_keys_open_routes_and_only_admins_see_the_numbers() -> None:
    async with serving(keys=KEYS) as server:
        for path in ("/health", "/ready"):
            assert (await server.get(path))[0] == 200
        async with server.session.get(server.url + "/") as page:
            assert page.status == 200
        assert (await server.get("/v1/models", headers=ANN))[0] == 200
        for path in ("/status", "/metrics"):
            status, reply = await server.get(path, headers=ANN)
            assert (status, error(403, reply)["code"]) == (403, "admin_required")
            async with server.session.get(server.url + path, headers=ROOT) as response:
                assert response.status == 200


ONE_A_DAY = (LimitConfig(period="day", requests=1),)
TIGHT = {
    "keys": {"ann": keyed("secret", user="ann", limits=ONE_A_DAY), "root": KEYS["root"]},
    "end_users": {"ann": keyed("secret", user="ann", end_user_limits=ONE_A_DAY), "root": KEYS["root"]},
    "runs": {"ann": keyed("secret", user="ann", run=RunConfig(max_calls=1)), "root": KEYS["root"]},
}


@pytest.mark.parametrize(
    ("sections", "scope"),
    [
        ({"keys": TIGHT["keys"]}, {"scope": "key", "key": "ann"}),
        ({"keys": KEYS, "users": {"ann": UserConfig(limits=ONE_A_DAY)}}, {"scope": "user", "user": "ann"}),
        ({"keys": TIGHT["end_users"]}, {"scope": "end_user", "key": "ann", "end_user": "bob"}),
        ({"keys": TIGHT["runs"]}, {"scope": "run", "key": "ann", "run": "r1"}),
        ({"keys": KEYS, "spend": SpendConfig(limit=40e-6), "prices": PricesConfig(decode=2.0)}, {"scope": "server"}),
        ({"local": AccountConfig(limits=ONE_A_DAY)}, {"scope": "key"}),
    ],
    ids=lambda value: value.get("scope", ""),
)
async def test_an_admin_can_reset_what_is_counted(sections: dict[str, Any], scope: dict[str, str]) -> None:
    """Sixteen tokens may cost 32 millionths: the server's limit has room for one call that is not settled at less."""
    engine = FakeEngine(say("x" * 16))
    headers = {**ANN, "X-Run-ID": "r1"}
    async with serving(engine, **sections) as server:
        for reset in (False, True):
            if reset:
                status, reply = await server.post("/limits/reset", scope, headers=ROOT)
                assert (status, reply["reset"]["scope"]) == (200, scope["scope"])
            for expected in (200, 429):
                status, _ = await server.post("/v1/completions", COMPLETION | {"user": "bob"}, headers=headers)
                assert status == expected


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "scope"),
        ({"scope": "feature"}, 400, "scope"),
        ({"scope": "user"}, 400, "user"),
        ({"scope": "end_user", "key": "ann"}, 400, "end_user"),
        ({"scope": "run", "key": "ann", "run": 3}, 400, "run"),
        ({"scope": "key", "key": "typo"}, 404, "key"),
        ({"scope": "run", "key": "ann", "run": "typo"}, 404, "run"),
        ({"scope": "server"}, 404, "scope"),
    ],
)
async def test_a_reset_names_what_it_can_not_find_and_needs_an_admin(
    body: dict[str, Any], status: int, param: str
) -> None:
    async with serving(keys=TIGHT["keys"]) as server:
        found, reply = await server.post("/limits/reset", body, headers=ROOT)
        assert (found, error(status, reply)["param"]) == (status, param)
        found, reply = await server.post("/limits/reset", body, headers=ANN)
        assert (found, error(403, reply)["code"]) == (403, "admin_required")


async def test_tenants_have_caches_of_their_own_and_salts_chain_inside() -> None:
    async with serving(keys=KEYS) as server:
        for headers, salt in ((ANN, None), (ANN, "a"), (ROOT, None), (ROOT, "a"), (ANN, "b")):
            await server.post("/v1/completions", {**COMPLETION, "cache_salt": salt}, headers=headers)
        salts = [submission.salt for submission in server.engine.submissions]
        assert len(set(salts)) == 5
        status, reply = await server.post("/v1/completions", {**COMPLETION, "cache_salt": "x" * 129}, headers=ANN)
        assert (status, reply["error"]["param"]) == (400, "cache_salt")


async def test_a_key_clamps_priority_and_chooses_pools() -> None:
    keys = {"k": keyed("secret", min_priority=5, pools=("bulk",)), "plain": keyed("plain")}
    async with serving(keys=keys) as server:
        await server.post("/v1/completions", {**COMPLETION, "priority": -9, "pool": "bulk"}, headers=ANN)
        submission = server.engine.submissions[-1]
        assert (submission.priority, submission.pool) == (5, "bulk")
        other = {"Authorization": "Bearer plain"}
        status, reply = await server.post("/v1/completions", {**COMPLETION, "pool": "bulk"}, headers=other)
        assert (status, error(403, reply)["code"]) == (403, "pool_not_allowed")


# -- information


async def test_the_model_list_and_one_model(server: Server) -> None:
    _, listed = await server.get("/v1/models")
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", CONTEXT)
    assert await server.get(f"/v1/models/{MODEL}") == (200, card)


async def test_tokenize_takes_three_forms_and_detokenize_answers(server: Server) -> None:
    status, reply = await server.post("/tokenize", {"prompt": "Hé", "return_token_strs": True})
    assert status == 200
    assert (reply["tokens"], reply["count"], reply["max_model_len"]) == ([72, 195, 169], 3, CONTEXT)
    assert reply["token_strs"] == ["H", "�", "�"]
    assert (await server.post("/tokenize", {"content": "Hé"}))[1]["tokens"] == [72, 195, 169]
    _, chat = await server.post("/tokenize", {"messages": CHAT["messages"]})
    await server.post("/v1/chat/completions", CHAT)
    assert tuple(chat["tokens"]) == server.engine.submissions[-1].prompt
    assert (await server.post("/detokenize", {"tokens": [72, 195, 169]}))[1] == {"prompt": "Hé", "content": "Hé"}
    for bad in ({}, {"prompt": "a", "content": "b"}, {"prompt": 5}):
        assert (await server.post("/tokenize", bad))[0] == 400
    assert (await server.post("/detokenize", {"tokens": [-1]}))[0] == 400


# bug: 74
async def test_there_is_exactly_one_bos_however_a_prompt_is_made() -> None:
    source = load_dummy("dummy").tokenizer
    assert isinstance(source, TokenizerJson)
    tokenizer = Tokenizer.from_source(replace(source, add_bos=True))
    template = ChatTemplate("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", tokenizer)
    async with serving(model=tiny_model(tokenizer=tokenizer, template=template)) as server:
        bos = tokenizer.bos_id
        expected = [bos, 72, 105]
        assert (await server.post("/tokenize", {"prompt": "Hi"}))[1]["tokens"] == expected
        assert (await server.post("/tokenize", {"messages": CHAT["messages"]}))[1]["tokens"] == expected
        assert (await server.post("/tokenize", {"prompt": "Hi", "add_special_tokens": False}))[1]["tokens"] == [72, 105]
        await server.post("/v1/chat/completions", CHAT)
        for prompt in ("Hi", "<|endoftext|>Hi"):
            await server.post("/v1/completions", {"prompt": prompt})
        assert [list(submission.prompt) for submission in server.engine.submissions] == [expected] * 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"content": "a", "add_special": True}, "add_special"),
        ({"content": "<|im_end|>a", "parse_special": False}, "parse_special"),
        ({"content": "a", "with_pieces": True}, "with_pieces"),
        ({"prompt": "a", "tools": []}, "tools"),
    ],
)
async def test_what_tokenize_can_not_do_is_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    status, body = await server.post("/tokenize", fields)
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "unsupported_parameter", param)
    harmless = {"add_special": False, "parse_special": True, "with_pieces": False}
    assert (await server.post("/tokenize", {"content": "a"} | harmless))[0] == 200


NESTED: Any = []
for _ in range(900):
    NESTED = [NESTED]


@pytest.mark.parametrize("path", ["/v1/chat/completions/render", "/tokenize", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "another"}, 404, "model"),
        ({"tools": [{}]}, 400, "tools"),
        ({"chat_template": "{{ 1 }}"}, 400, "chat_template"),
        ({"chat_template_kwargs": {"deep": NESTED}}, 400, "chat_template_kwargs"),
    ],
)
async def test_who_only_looks_is_refused_what_who_generates_is(
    server: Server, path: str, fields: dict[str, Any], status: int, param: str
) -> None:
    got, reply = await server.post(path, CHAT | fields)
    assert (got, reply["error"]["param"]) == (status, param)


async def test_detokenize_knows_what_is_served(server: Server) -> None:
    assert (await server.post("/detokenize", {"model": "another", "tokens": [1]}))[0] == 404


async def test_render_shows_what_the_template_makes(server: Server) -> None:
    status, reply = await server.post("/v1/chat/completions/render", CHAT)
    assert status == 200
    assert reply["prompt"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert reply["count"] == len(reply["tokens"])
    assert not server.engine.submissions


async def test_health_and_ready_follow_the_engine(server: Server) -> None:
    for state, healthy, ready in (
        (State.READY, 200, 200),
        (State.DRAINING, 200, 503),
        (State.FAILED, 503, 503),
        (State.STOPPED, 503, 503),
    ):
        server.engine.state = state
        assert (await server.get("/health"))[0] == healthy
        assert (await server.get("/ready"))[0] == ready


# bug: 61
async def test_gauges_are_read_when_scraped() -> None:
    engine = FakeEngine(None)
    async with serving(engine) as server:
        body = {**COMPLETION, "stream": True}
        open_streams = [await server.session.post(server.url + "/v1/completions", json=body) for _ in range(20)]
        assert await running(server) == 20
        for response in open_streams:
            response.close()
        await server.settled()
        assert await running(server) == 0


async def running(server: Server) -> float:
    async with server.session.get(server.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    gauge = 'vllm:num_requests_running{model_name="tiny",pool="interactive"}'
    (line,) = [row for row in text.splitlines() if row.startswith(gauge)]
    return float(line.split()[-1])


async def test_status_says_what_is_going_on(server: Server) -> None:
    await server.post("/v1/completions", COMPLETION)
    status, reply = await server.get("/status?steps=10")
    assert status == 200
    assert (reply["model"], reply["state"], reply["calls"], reply["blocks_total"]) == (MODEL, "ready", 0, 100)
    assert reply["numbers"]["pools"]["interactive"]["requests"] == 0
    assert reply["findings"]
    assert "requests" not in reply
    server.engine.script = None
    async with server.session.post(server.url + "/v1/completions", json={**COMPLETION, "stream": True}):
        _, reply = await server.get("/status?requests=1")
    assert [(live["phase"], live["blocks"]) for live in reply["requests"]] == [("decode", [5])]
    assert set((await server.get("/version"))[1]) == {"version"}


async def test_the_page_is_served_with_its_files(server: Server) -> None:
    async with server.session.get(server.url + "/") as response:
        assert response.content_type == "text/html"
        assert "default-src 'self'" in response.headers["Content-Security-Policy"]
        tag = response.headers["ETag"]
    async with server.session.get(server.url + "/", headers={"If-None-Match": tag}) as response:
        assert response.status == 304
    async with server.session.get(server.url + "/static/client.js") as response:
        assert (response.status, response.content_type) == (200, "text/javascript")


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
