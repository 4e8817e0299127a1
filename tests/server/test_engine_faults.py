"""A real engine that is slow, fails, or is drained, seen over HTTP."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import pytest

from minserve.config import TimeoutsConfig
from minserve.server.serve import drain
from tests.server.real import GREEDY, idle_invariants, real_server, until
from tests.server.serving import COMPLETION


async def test_health_answers_at_once_while_a_step_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async with real_server() as (server, assembly):
        run = assembly.engine.runner.run

        def slow(*args: Any) -> Any:
            time.sleep(0.3)
            return run(*args)

        monkeypatch.setattr(assembly.engine.runner, "run", slow)
        task = asyncio.create_task(server.post("/v1/completions", {**COMPLETION, **GREEDY, "max_tokens": 5}))
        waits = []
        while not task.done():
            started = time.monotonic()
            assert (await server.get("/health"))[0] == 200
            waits.append(time.monotonic() - started)
            await asyncio.sleep(0.01)
        assert (await task)[0] == 200
        assert len(waits) > 30
        assert sorted(waits)[int(len(waits) * 0.95)] < 0.1


# bug: 50
async def test_a_failed_step_ends_its_requests_and_two_in_a_row_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with real_server() as (server, assembly):
        run = assembly.engine.runner.run
        countdown = 5

        def fails_at_times(*args: Any) -> Any:
            nonlocal countdown
            countdown -= 1
            if countdown in (0, -100, -101):
                raise RuntimeError("a prompt's text could stand here")
            return run(*args)

        monkeypatch.setattr(assembly.engine.runner, "run", fails_at_times)
        text = await server.events("/v1/completions", {**COMPLETION, **GREEDY, "max_tokens": 50})
        assert '"code":"engine_error"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert "a prompt's text" not in text
        assert (await server.post("/v1/completions", {**COMPLETION, **GREEDY, "max_tokens": 5}))[0] == 200
        assert (await server.get("/health"))[0] == 200
        countdown = -99
        for _ in range(2):
            assert (await server.post("/v1/completions", COMPLETION))[0] == 500
        assert (await server.get("/health"))[0] == 503
        status, reply = await server.post("/v1/completions", COMPLETION)
        assert (status, reply["error"]["code"]) == (503, "engine_failed")


# bug: 63
async def test_drain_finishes_what_it_can_and_ends_the_rest_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts = TimeoutsConfig(drain_s=1.0)
    async with real_server(timeouts=timeouts) as (server, assembly):
        long = {**COMPLETION, **GREEDY, "max_tokens": 400}
        short = {**COMPLETION, **GREEDY, "max_tokens": 10}
        run = assembly.engine.runner.run

        def slow(*args: Any) -> Any:
            time.sleep(0.02)
            return run(*args)

        monkeypatch.setattr(assembly.engine.runner, "run", slow)
        streams = [asyncio.create_task(server.events("/v1/completions", body)) for body in (long, short)]
        await until(lambda: server.engine.status().streams == 2)  # these have seats; the others may come in any order
        whole = asyncio.create_task(server.post("/v1/completions", long))
        queued = [asyncio.create_task(server.events("/v1/completions", long)) for _ in range(10)]
        await until(lambda: server.engine.status().streams + len(server.rows) == 13)  # all came; one may have ended
        lines: list[str] = []
        draining = asyncio.create_task(drain(server.services, server.site, lines.append))
        await asyncio.sleep(0.05)
        assert (await server.get("/ready"))[0] == 503
        status, reply = await server.post("/v1/completions", short)
        assert (status, reply["error"]["code"]) == (503, "draining")
        cut, done = await asyncio.gather(*streams)
        assert '"code":"shutting_down"' in cut
        assert '"finish_reason":"length"' in done
        assert (await whole)[0] == 503
        for text in await asyncio.gather(*queued):
            assert text.endswith("data: [DONE]\n\n")
        await draining
        idle_invariants(server)
        assert "Stopping" in lines[0]
        assert len(server.rows) == 14
        with pytest.raises(aiohttp.ClientError):
            await server.get("/health")
