"""How calls end: exactly one row each, whatever ended them, and nothing left behind."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from minserve.config import (
    AccountConfig,
    LimitConfig,
    PoolConfig,
    PoolsConfig,
    PricesConfig,
    ServerConfig,
    TimeoutsConfig,
)
from minserve.economics.ledger import Ledger
from minserve.economics.prices import NANO, money
from minserve.engine import Progress
from minserve.observe.log import setup
from minserve.request import FinishReason, RequestError, TextDelta, Usage
from minserve.server.completions import CompletionAnswer
from tests.server.fakes import CHAT, COMPLETION, FakeEngine, Server, keyed, say, serving

STREAM = {**COMPLETION, "stream": True}


async def open_stream(server: Server, body: Any = STREAM) -> aiohttp.ClientResponse:
    response = await server.session.post(server.url + "/v1/completions", json=body)
    assert response.status == 200
    return response


def error_event(text: str) -> dict[str, Any]:
    """The error of a stream that ended with one, as every such stream must: error, then [DONE], once."""
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    error: dict[str, Any] = json.loads(events[-2])["error"]
    return error


# bug: 60
async def test_every_admitted_call_has_one_row_and_the_sums_agree() -> None:
    async with serving(FakeEngine(say("Hello"))) as server:
        await server.post("/v1/completions", COMPLETION)
        await server.events("/v1/chat/completions", CHAT)
        await server.post("/v1/completions", {**COMPLETION, "n": 2, "prompt": ["a", "bc"]})
        finishes = [(row.finish, row.status, row.completion_tokens) for row in server.rows]
        assert finishes == [("stop", 200, 5), ("stop", 200, 5), ("stop", 200, 20)]
        assert [row.prompt_tokens for row in server.rows][2] == 3
        assert [row.choices for row in server.rows] == [1, 1, 4]
        assert len({row.id for row in server.rows}) == 3


# bug: 13
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_call(stream: bool) -> None:
    engine = FakeEngine(None)
    async with serving(engine) as server:
        task = asyncio.create_task(server.post("/v1/completions", {**COMPLETION, "stream": stream}))
        opened = await engine.stream()
        opened.push(TextDelta(0, "a", (97,)))
        await asyncio.sleep(0.05)
        task.cancel()
        await server.settled()
        assert opened.closed
        (row,) = server.rows
        assert (row.finish, row.status, row.code) == ("abort", 499, "client_closed")


# bug: 14
async def test_normal_ends_are_no_aborts_and_early_closes_all_are() -> None:
    engine = FakeEngine(say("ab"))
    async with serving(engine) as server:
        for _ in range(5):
            await asyncio.gather(*(server.events("/v1/completions", COMPLETION) for _ in range(20)))
        assert [row.finish for row in server.rows] == ["stop"] * 100
        server.rows.clear()
        engine.script = None
        for response in await asyncio.gather(*(open_stream(server) for _ in range(30))):
            response.close()
        await server.settled()
        assert [row.finish for row in server.rows] == ["abort"] * 30


# bug: 15
async def test_clients_that_leave_while_queued_leave_no_work_behind() -> None:
    engine = FakeEngine(None)
    async with serving(engine) as server:
        responses = await asyncio.gather(*(open_stream(server) for _ in range(20)))
        assert len(engine.streams) == 20
        for response in responses:
            response.close()
        await server.settled()
        assert not engine.streams
        assert all((row.prompt_tokens, row.completion_tokens) == (0, 0) for row in server.rows)


# bug: 16
async def test_what_was_read_of_a_prompt_is_billed_when_its_client_leaves() -> None:
    engine = FakeEngine(None)
    async with serving(engine) as server:
        response = await open_stream(server, {**STREAM, "prompt": "x" * 300})
        (await engine.stream()).progress = Progress("prefill", 128, 300, 0)
        response.close()
        await server.settled()
        assert server.rows[0].prompt_tokens == 128


async def test_a_lingering_server_finishes_what_a_client_left() -> None:
    engine = FakeEngine(None)
    async with serving(engine, server=ServerConfig(on_disconnect="linger")) as server:
        response = await open_stream(server)
        stream = await engine.stream()
        response.close()
        await asyncio.sleep(0.1)
        assert not stream.closed
        stream.push(TextDelta(0, "a", (97,)))
        stream.push(TextDelta(0, finish=FinishReason.STOP, usage=Usage(2, 0, 1)))
        await server.settled()
        (row,) = server.rows
        assert (row.finish, row.status, row.completion_tokens) == ("stop", 499, 1)


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


async def test_a_server_that_can_not_record_its_calls_is_not_ready_and_counts_what_it_lost(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.db")
    async with serving(book=ledger) as server:
        assert (await server.get("/ready")) == (200, {"status": "ready"})
        ledger.database.execute("PRAGMA query_only = ON")
        for _ in range(2):
            status, body = await server.post("/v1/completions", COMPLETION)
            assert (status, body["error"]["code"]) == (503, "ledger_unavailable")
        assert (await server.get("/ready")) == (503, {"status": "ledger_unavailable"})
        assert (await server.get("/health"))[0] == 200
        async with server.session.get(server.url + "/metrics") as response:
            page = await response.text()
        assert "# TYPE minserve_ledger_lost_rows_total counter" in page
        assert f'minserve_ledger_lost_rows_total{{model_name="tiny"}} {ledger.lost_rows}.0' in page
        assert ledger.lost_rows > 0
        ledger.database.execute("PRAGMA query_only = OFF")


async def test_numbers_that_no_ledger_holds_do_it_no_harm(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.db")
    async with serving(book=ledger) as server:
        for wrong in ({"max_tokens": -(10**30)}, {"n": 10**30}, {"n": 2**40, "max_tokens": 2**40}):
            assert (await server.post("/v1/completions", {**COMPLETION, **wrong}))[0] == 400
        assert (await server.post("/v1/completions", {**COMPLETION, "max_tokens": 10**30}))[0] == 200
        await ledger.flush()
        found = ledger.database.execute("SELECT status, asked_max_tokens FROM calls ORDER BY seq").fetchall()
    assert found == [(400, -(2**31) + 1), (400, None), (400, 2**31 - 1), (200, 2**31 - 1)]


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


async def test_abort_ends_a_call_by_id_and_only_ones_own() -> None:
    keys = {"a": keyed("a"), "b": keyed("b"), "root": keyed("root", admin=True)}
    engine = FakeEngine(None)
    async with serving(engine, keys=keys) as server:
        for aborter, status in (("b", 404), ("a", 200)):
            by = {"Authorization": f"Bearer {aborter}"}
            if aborter == "b":
                own = {"Authorization": "Bearer a"}
                response = await server.session.post(server.url + "/v1/completions", json=STREAM, headers=own)
                call_id = (await engine.stream()).submission.id
            reply = await server.post("/abort", {"id": f"{call_id}#0"}, headers=by)  # as /status names it
            assert reply[0] == status
        assert error_event(await response.text())["code"] == "aborted"
        await server.settled()
        assert (server.rows[-1].finish, server.rows[-1].code) == ("error", "aborted")
        assert (await server.post("/abort", {"id": call_id}, headers=by))[0] == 404


async def test_malformed_calls_have_rows_too() -> None:
    async with serving(keys={"a": keyed("a")}) as server:
        own = {"Authorization": "Bearer a"}
        await server.post("/v1/completions", b"{", headers=own)
        await server.post("/v1/chat/completions", {**CHAT, "tools": []}, headers=own)
        await server.post("/v1/completions", COMPLETION)
        assert [(row.status, row.code, row.key) for row in server.rows] == [
            (400, "invalid_json", "a"),
            (400, "unsupported_parameter", "a"),
            (401, "missing_api_key", ""),
        ]


async def test_what_a_request_says_of_itself_stands_in_its_row() -> None:
    async with serving() as server:
        body = {**COMPLETION, "user": "bob", "metadata": {"feature": "search", "run_id": "r1"}}
        await server.post("/v1/completions", body)
        row = server.rows[0]
        assert (row.user, row.end_user, row.feature, row.run) == ("local", "bob", "search", "r1")
        status, reply = await server.post("/v1/completions", {**body, "metadata": {"feature": "x" * 500}})
        assert (status, reply["error"]["param"]) == (400, "metadata.feature")


async def test_no_text_of_a_prompt_reaches_the_log() -> None:
    secret, lines = "the-secret-words", io.StringIO()
    setup("console", "debug", lines)
    async with serving(FakeEngine(say("the-secret-reply"))) as server:
        await server.post("/v1/completions", {**COMPLETION, "prompt": secret})
        await server.post("/v1/completions", {**COMPLETION, "prompt": secret, "stop": [""]})
        await server.post("/v1/chat/completions", {"messages": [{"role": secret, "content": secret}]})
        await server.post("/v1/completions", json.dumps({"prompt": secret}).encode() + b"}")
        await server.get(f"/{secret}")
    assert "completion_tokens=" in lines.getvalue()
    assert "the-secret" not in lines.getvalue()


# bug: 66
async def test_fifty_calls_at_once_against_a_budget_for_two() -> None:
    local = AccountConfig(limits=(LimitConfig(period="day", requests=2),))
    async with serving(FakeEngine(say("ok")), local=local) as server:
        replies = await asyncio.gather(*(server.post("/v1/completions", COMPLETION) for _ in range(50)))
        assert sorted(status for status, _ in replies) == [200] * 2 + [429] * 48
        assert len(server.engine.submissions) == 2
        assert sorted(row.finish for row in server.rows) == ["refused"] * 48 + ["stop"] * 2


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
