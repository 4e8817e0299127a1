"""Time runs out in layers, over the real engine: each layer has its own code, and whatever ended frees everything."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import structs

from minserve.config import AccountConfig, PoolConfig, PoolsConfig, PricesConfig, TimeoutsConfig
from minserve.economics.prices import NANO, money
from minserve.request import FinishReason, Pool, TextDelta, Usage
from minserve.server.text_worker import TextWorker
from tests.server.fakes import FakeEngine
from tests.server.real import SMALL, idle_invariants, real_server, until
from tests.server.serving import COMPLETION, Server, serving

BODY = {**COMPLETION, "max_tokens": 300, "ignore_eos": True, "temperature": 0}
DEADLINE = "X-Minserve-Deadline-Ms"


@asynccontextmanager
async def slow_server(
    step: Callable[[int], float],
    *,
    timeouts: TimeoutsConfig,
    queue_timeout_s: float = 5.0,
    seats: int = 2,
    prices: PricesConfig = PricesConfig(),  # noqa: B008
) -> AsyncIterator[Server]:
    """step: how long the n-th step takes at least."""
    pools = PoolsConfig(interactive=PoolConfig(queue_timeout_s=queue_timeout_s))
    engine = structs.replace(SMALL, max_num_seqs=seats)
    local = AccountConfig(pools=("bulk",))
    async with real_server(engine, timeouts=timeouts, pools=pools, local=local, prices=prices) as (server, assembly):
        run, steps = assembly.engine.runner.run, iter(range(10**6))

        def slowly(*args: Any) -> Any:
            time.sleep(step(next(steps)))
            return run(*args)

        assembly.engine.runner.run = slowly  # type: ignore[assignment,method-assign]
        yield server


async def ended(server: Server, body: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
    """(status, error, headers) of a call, whole or streamed; what a stream's last event says stands for its status."""
    rows = len(server.rows)
    async with server.session.post(server.url + "/v1/completions", json=body, headers=headers) as response:
        text = await response.text()
    await until(lambda: len(server.rows) > rows)
    if response.content_type == "application/json":
        return response.status, json.loads(text)["error"], response.headers
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return server.rows[rows].status, json.loads(events[-2])["error"], response.headers


async def at_rest(server: Server) -> None:
    await server.settled()
    idle_invariants(server)


LAYERS = {
    # step time, timeouts -> code
    "first_token_timeout": (lambda n: 0.5, TimeoutsConfig(first_token_s=0.2, total_s=5)),
    "token_gap_timeout": (lambda n: 0.0 if n < 4 else 0.5, TimeoutsConfig(token_gap_s=0.2, first_token_s=2, total_s=5)),
    "total_timeout": (lambda n: 0.01, TimeoutsConfig(token_gap_s=0.3, first_token_s=0.4, total_s=0.5)),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", LAYERS)
async def test_each_layer_has_its_own_code_and_frees_everything(code: str, stream: bool) -> None:
    step, timeouts = LAYERS[code]
    async with slow_server(step, timeouts=timeouts) as server:
        status, error, _ = await ended(server, {**BODY, "stream": stream})
        assert (status, error["code"], error["type"]) == (504, code, "server_error")
        await at_rest(server)
        (row,) = server.rows
        assert (row.status, row.code) == (504, code)
        assert (row.completion_tokens > 1) is (code != "first_token_timeout")  # one may come of the step that ran


@pytest.mark.parametrize("stream", [False, True])
async def test_the_queue_has_a_ceiling_below_the_first_token(stream: bool) -> None:
    timeouts = TimeoutsConfig(first_token_s=3, total_s=5)
    async with slow_server(lambda n: 0.01, timeouts=timeouts, queue_timeout_s=0.2, seats=1) as server:
        long = asyncio.create_task(server.post("/v1/completions", {**BODY, "max_tokens": 150}))
        await until(lambda: server.engine.status().running[Pool.INTERACTIVE] == 1)
        status, error, headers = await ended(server, {**BODY, "stream": stream})
        assert (status, error["code"]) == (503, "queue_timeout")
        seconds = int(headers["Retry-After"])  # a stream has not begun: its status line waits in a short queue
        began = time.monotonic()
        assert (await long)[0] == 200
        assert seconds / 2 - 1 <= time.monotonic() - began <= seconds * 2
        await at_rest(server)
        assert (server.rows[0].status, server.rows[0].prompt_tokens, server.rows[0].cost) == (503, 0, 0)


async def test_a_reader_that_stalls_frees_its_seat_and_blocks() -> None:
    timeouts = TimeoutsConfig(write_stall_s=0.3)
    async with slow_server(lambda n: 0.02, timeouts=timeouts, seats=6) as server:
        server.site._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
        host, port = server.url.removeprefix("http://").split(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((host, int(port)))
            body = json.dumps({**BODY, "n": 5, "max_tokens": 80, "logprobs": 20, "stream": True}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            sock.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: bool(server.rows))
        assert (server.rows[0].status, server.rows[0].code, server.rows[0].finish) == (499, "write_stalled", "abort")
        assert 0 < server.rows[0].completion_tokens < 400
        await at_rest(server)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_step_that_hangs_has_its_own_code(stream: bool) -> None:
    async with real_server(step_timeout=0.2) as (server, assembly):
        run, hung = assembly.engine.runner.run, threading.Event()

        def hangs(*args: Any) -> Any:
            hung.wait(5)
            return run(*args)

        assembly.engine.runner.run = hangs  # type: ignore[assignment,method-assign]
        status, error, _ = await ended(server, {**BODY, "stream": stream})
        assert (status, error["code"]) == (503, "step_timeout")
        assert (server.rows[0].status, server.rows[0].code) == (503, "step_timeout")
        assert (await server.get("/health"))[0] == 503
        assert (await ended(server, BODY))[1]["code"] == "step_timeout"  # nobody else will fare better
        hung.set()


PRICES = PricesConfig(prefill=100.0, decode=100.0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_runs_out_of_time_says_what_it_costs(stream: bool) -> None:
    async with slow_server(lambda n: 0.01, timeouts=TimeoutsConfig(), prices=PRICES) as server:
        _, error, headers = await ended(server, {**BODY, "stream": stream}, {DEADLINE: "300"})
        (row,) = server.rows
        assert 0 < row.cost < row.reserved
        assert headers["x-minserve-reserved-cost"] == money(row.reserved)
        assert (error.get("cost"), headers.get("x-minserve-cost")) == (
            (row.cost / NANO, None) if stream else (None, money(row.cost))
        )


async def test_an_error_does_not_wait_for_a_long_step_to_say_what_its_call_costs() -> None:
    timeouts = TimeoutsConfig(first_token_s=0.1)
    async with slow_server(lambda n: 1.0, timeouts=timeouts, prices=PRICES) as server:
        began = time.monotonic()
        async with server.session.post(server.url + "/v1/completions", json=BODY) as response:
            assert response.status == 504
            assert time.monotonic() - began < 0.8
            assert "x-minserve-cost" not in response.headers
            assert float(response.headers["x-minserve-reserved-cost"]) > 0
        await server.settled()


# -- the client's own deadline


@pytest.mark.parametrize("stream", [False, True])
async def test_a_clients_deadline_ends_its_call(stream: bool) -> None:
    async with slow_server(lambda n: 0.01, timeouts=TimeoutsConfig()) as server:
        began = time.monotonic()
        status, error, headers = await ended(server, {**BODY, "stream": stream}, {DEADLINE: "300"})
        assert 0.3 <= time.monotonic() - began < 2
        assert (status, error["code"]) == (504, "deadline_exceeded")
        assert stream or headers["x-should-retry"] == "false"
        await at_rest(server)
        assert server.rows[0].completion_tokens > 1


async def test_a_deadline_counts_in_the_queue_and_a_call_in_time_never_sees_it() -> None:
    async with slow_server(lambda n: 0.01, timeouts=TimeoutsConfig(), seats=1) as server:
        body = {**BODY, "max_tokens": 80}
        long = asyncio.create_task(server.post("/v1/completions", body, headers={DEADLINE: "20000"}))
        await until(lambda: server.engine.status().running[Pool.INTERACTIVE] == 1)
        status, error, _ = await ended(server, BODY, {DEADLINE: "100"})
        assert (status, error["code"], server.rows[0].prompt_tokens) == (504, "deadline_exceeded", 0)
        assert (await long)[0] == 200
        await at_rest(server)


async def test_the_servers_own_limit_holds_below_a_long_deadline() -> None:
    timeouts = TimeoutsConfig(token_gap_s=0.2, first_token_s=0.3, total_s=0.4)
    async with slow_server(lambda n: 0.01, timeouts=timeouts) as server:
        assert (await ended(server, BODY, {DEADLINE: "60000"}))[1]["code"] == "total_timeout"


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "soon", "", "1" * 20, "²"])
async def test_a_deadline_that_is_none_is_refused(value: str) -> None:
    async with serving() as server:
        status, error, _ = await ended(server, COMPLETION, {DEADLINE: value})
        assert (status, error["param"]) == (400, DEADLINE)
        assert not server.engine.submissions


async def test_a_deadline_that_passes_before_the_engine_is_asked_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    read = TextWorker.run

    async def busy(self: TextWorker, key: str, job: Callable[[], Any]) -> Any:
        await asyncio.sleep(0.05)
        return await read(self, key, job)

    monkeypatch.setattr(TextWorker, "run", busy)
    async with serving() as server:
        status, error, _ = await ended(server, {**COMPLETION, "stream": True}, {DEADLINE: "10"})
        assert (status, error["code"]) == (504, "deadline_exceeded")
        assert not server.engine.submissions
        assert [(row.finish, row.status, row.code) for row in server.rows] == [("refused", 504, "deadline_exceeded")]


async def test_bulk_may_be_silent_for_longer() -> None:
    pools = PoolsConfig(interactive=PoolConfig(), bulk=PoolConfig(token_gap_s=5))
    timeouts = TimeoutsConfig(token_gap_s=0.1, first_token_s=6, total_s=10)
    engine = FakeEngine(None)
    async with serving(engine, timeouts=timeouts, pools=pools, local=AccountConfig(pools=("bulk",))) as server:
        task = asyncio.create_task(server.post("/v1/completions", {**COMPLETION, "pool": "bulk"}))
        stream = await engine.stream()
        stream.push(TextDelta(0, "a", (97,)))
        await asyncio.sleep(0.3)
        stream.push(TextDelta(0, "b", (98,), finish=FinishReason.STOP, usage=Usage(2, 0, 2)))
        assert (await task)[0] == 200
