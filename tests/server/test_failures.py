"""A call that fails: with its real status before the first byte, as an event after it."""

from __future__ import annotations

import asyncio
import json

import pytest

from minserve.config import PricesConfig
from minserve.economics.prices import NANO, money
from minserve.request import FinishReason, RequestError, TextDelta
from minserve.server.completions import CompletionAnswer
from tests.server.fakes import FakeEngine, say
from tests.server.serving import COMPLETION, serving
from tests.server.streams import STREAM, error_event, open_stream


# bug: 50
@pytest.mark.parametrize(
    "error",
    [
        RequestError("The engine failed.", status=500, code="engine_error"),
        RequestError("Waited too long.", status=503, code="queue_timeout", retry_after=2.5),
    ],
)
async def test_a_failure_after_the_first_chunks_is_an_event_and_the_stream_is_complete(error: RequestError) -> None:
    engine = FakeEngine(None)
    async with serving(engine) as server:
        response = await open_stream(server)
        stream = await engine.stream()
        stream.push(TextDelta(0, "abc", (97, 98, 99)), TextDelta(0, finish=FinishReason.ERROR, error=error))
        text = await response.text()
        assert '"text":"abc"' in text
        event = error_event(text)
        assert (event["message"], event["code"]) == (error.message, error.code)
        assert event.get("retry_after") == (None if error.retry_after is None else 3)
        assert (server.rows[0].finish, server.rows[0].code) == ("error", error.code)


async def test_the_same_failure_before_any_byte_has_its_real_status() -> None:
    engine = FakeEngine(None)
    async with serving(engine) as server:
        task = asyncio.create_task(server.session.post(server.url + "/v1/completions", json=COMPLETION))
        error = RequestError("Waited too long.", status=503, code="queue_timeout", retry_after=2.5)
        (await engine.stream()).end(FinishReason.ERROR, error)
        response = await task
        assert (response.status, response.headers["Retry-After"]) == (503, "3")
        assert (await response.json())["error"]["code"] == "queue_timeout"
        assert server.rows[0].status == 503


async def test_a_full_queue_refuses_before_headers_go_out() -> None:
    engine = FakeEngine()
    engine.refusal = RequestError("Full.", status=503, code="queue_full", retry_after=7)
    async with serving(engine) as server:
        async with server.session.post(server.url + "/v1/completions", json=STREAM) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "7")
            assert response.content_type == "application/json"
        (row,) = server.rows
        assert (row.finish, row.status, row.code, row.cost) == ("refused", 503, "queue_full", 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_fault_of_ours_says_what_its_call_costs(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr(CompletionAnswer, "events" if stream else "collect", broken)
    async with serving(FakeEngine(say("Hello")), prices=PricesConfig(prefill=1.0, decode=2.0)) as server:
        async with server.session.post(server.url + "/v1/completions", json={**COMPLETION, "stream": stream}) as reply:
            text, headers = await reply.text(), reply.headers
        (row,) = server.rows
        assert (row.status, row.code, row.finish) == (500, "internal_error", "abort")
        error = error_event(text) if stream else json.loads(text)["error"]
        assert (error["code"], "secret" in text) == ("internal_error", False)
        assert headers["x-minserve-reserved-cost"] == money(row.reserved)
        assert (error.get("cost"), headers.get("x-minserve-cost")) == (
            (row.cost / NANO, None) if stream else (None, money(row.cost))
        )


async def test_a_fault_of_ours_before_admission_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("secret detail")

    async with serving() as server:
        monkeypatch.setattr(server.services.text, "run", broken)
        status, reply = await server.post("/v1/completions", COMPLETION)
        assert (status, reply["error"]["code"]) == (500, "internal_error")
        assert [(row.finish, row.status, row.code) for row in server.rows] == [("refused", 500, "internal_error")]
