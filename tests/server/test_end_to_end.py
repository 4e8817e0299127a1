"""HTTP over the real engine: what must hold with chunks, caches, aborts and failures underneath."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
import pytest

from minserve.assemble import Assembly
from minserve.config import AccountConfig, PoolConfig, PoolsConfig, TimeoutsConfig
from minserve.server.serve import drain
from tests.server.fakes import CHAT, COMPLETION, Server, keyed
from tests.server.real import SMALL, real_server

GREEDY = {"temperature": 0, "ignore_eos": True}


def idle_invariants(server: Server, assembly: Assembly) -> None:
    """Nothing is held by anybody: every block is free or only cached, every stream and row is closed."""
    assembly.engine.scheduler.check()
    status = server.engine.status()
    assert status.streams == 0
    assert sum(status.running.values()) + sum(status.waiting.values()) == 0
    assert status.blocks_free + status.blocks_cached == status.blocks_total
    assert server.services.gateway.live == 0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_call_that_fills_the_queue_alone_runs_where_nobody_waits() -> None:
    body = {**COMPLETION, **GREEDY, "prompt": ["a", "b", "c"], "n": 2, "max_tokens": 3}
    async with real_server(max_queue=4) as (server, assembly):
        status, reply = await server.post("/v1/completions", body)
        assert (status, len(reply["choices"])) == (200, 6)
        idle_invariants(server, assembly)


async def test_a_call_that_a_full_queue_refuses_is_refused_in_its_row_and_in_the_metrics() -> None:
    body = {**COMPLETION, **GREEDY, "prompt": ["a", "b"], "max_tokens": 100}
    async with real_server(msgspec.structs.replace(SMALL, max_num_seqs=1), max_queue=1) as (server, assembly):
        first = asyncio.create_task(server.post("/v1/completions", body))
        await until(lambda: sum(server.engine.status().waiting.values()) > 0)
        status, reply = await server.post("/v1/completions", body)
        assert (status, reply["error"]["code"]) == (503, "queue_full")
        assert [(row.finish, row.status, row.cost) for row in server.rows] == [("refused", 503, 0)]
        async with server.session.get(server.url + "/metrics") as response:
            assert 'vllm:admission_rejections_total{model_name="tiny",reason="queue_full"} 1.0' in await response.text()
        assert (await first)[0] == 200
        idle_invariants(server, assembly)


async def test_streaming_and_whole_answers_agree_whatever_shares_the_batch() -> None:
    async with real_server() as (server, assembly):
        bodies = [{**COMPLETION, **GREEDY, "prompt": "word " * i, "max_tokens": 20} for i in range(1, 9)]
        alone = [(await server.post("/v1/completions", body))[1]["choices"][0]["text"] for body in bodies]
        together = await asyncio.gather(*(server.post("/v1/completions", body) for body in bodies))
        assert [reply["choices"][0]["text"] for _, reply in together] == alone
        streams = await asyncio.gather(*(server.events("/v1/completions", body) for body in bodies))
        assert [streamed_text(text) for text in streams] == alone
        idle_invariants(server, assembly)


def streamed_text(stream: str) -> str:
    events = [e.removeprefix("data: ") for e in stream.split("\n\n") if e.startswith("data: ") and "[DONE]" not in e]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


# bug: 27
async def test_a_prompt_is_scored_in_full_with_a_cached_prefix_and_in_chunks() -> None:
    async with real_server() as (server, _):
        body = {**COMPLETION, "prompt": "A prompt of many blocks. " * 8, "echo": True, "logprobs": 2, "max_tokens": 0}
        _, first = await server.post("/v1/completions", body)
        _, again = await server.post("/v1/completions", body)
        scores = first["choices"][0]["logprobs"]
        assert len(scores["tokens"]) == first["usage"]["prompt_tokens"] == 200
        assert scores["token_logprobs"][0] is None
        assert all(value <= 0 for value in scores["token_logprobs"][1:])
        assert again["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(
            scores["token_logprobs"][1:], abs=1e-4
        )
        assert "".join(scores["tokens"]) == body["prompt"] == first["choices"][0]["text"]
        assert first["usage"]["completion_tokens"] == 0


async def test_a_prompt_without_an_answer_is_work_too() -> None:
    async with real_server() as (server, _):
        body = {**COMPLETION, "prompt": "x" * 50, "max_tokens": 0}
        for scoring in ({"echo": True, "logprobs": 0}, {}):
            assert (await server.post("/v1/completions", {**body, **scoring}))[0] == 200
        assert [(row.prompt_tokens, row.cached_tokens, row.completion_tokens) for row in server.rows] == [
            (50, 0, 0),
            (50, 48, 0),
        ]


async def test_cached_prompt_tokens_are_reported() -> None:
    async with real_server() as (server, _):
        body = {**COMPLETION, "prompt": "x" * 50, "max_tokens": 1}
        _, cold = await server.post("/v1/completions", body)
        _, warm = await server.post("/v1/completions", body)
        assert cold["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert warm["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}
        _, salted = await server.post("/v1/completions", {**body, "cache_salt": "mine"})
        assert salted["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


# bug: 29
async def test_one_tenants_prompts_are_never_warm_for_another() -> None:
    keys = {name: keyed(name) for name in ("ann", "bob")}
    async with real_server(keys=keys) as (server, _):
        body = {**COMPLETION, "prompt": "x" * 50, "max_tokens": 1}
        cached = []
        for name in ("ann", "bob", "ann", "bob"):
            _, reply = await server.post("/v1/completions", body, headers={"Authorization": f"Bearer {name}"})
            cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 0, 48, 48]


# bug: 7
async def test_stop_strings_never_show_and_end_the_answer() -> None:
    async with real_server() as (server, _):
        body = {**COMPLETION, **GREEDY, "max_tokens": 30}
        _, free = await server.post("/v1/completions", body)
        text = free["choices"][0]["text"]
        stop = text[5:8]
        stopped = {**body, "stop": [stop]}
        _, whole = await server.post("/v1/completions", stopped)
        choice = whole["choices"][0]
        assert choice["text"] == text[: text.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert streamed_text(await server.events("/v1/completions", stopped)) == choice["text"]
        _, kept = await server.post("/v1/completions", {**stopped, "include_stop_str_in_output": True})
        assert kept["choices"][0]["text"] == choice["text"] + stop


# bug: 13
async def test_a_non_streaming_client_that_leaves_frees_everything_within_a_few_steps() -> None:
    async with real_server() as (server, assembly):
        body = {**COMPLETION, **GREEDY, "max_tokens": 400}
        task = asyncio.create_task(server.post("/v1/completions", body))
        await until(lambda: any(server.engine.status().running.values()))
        task.cancel()
        await server.settled()
        idle_invariants(server, assembly)
        (row,) = server.rows
        assert (row.status, row.finish) == (499, "abort")
        assert 0 <= row.completion_tokens < 400


# bug: 18
# bug: 60
async def test_random_clients_that_leave_at_random_moments_leave_nothing_behind() -> None:
    random_ = random.Random(5)
    async with real_server(max_queue=200, local=AccountConfig(pools=("bulk",))) as (server, assembly):
        admitted = 0

        async def client(k: int) -> None:
            nonlocal admitted
            prompt = "shared prefix of several blocks " * random_.randrange(3) + "x" * random_.randrange(1, 60)
            body = {
                **COMPLETION,
                "prompt": prompt,
                "max_tokens": random_.randrange(0, 40),
                "n": random_.choice((1, 1, 1, 3)),
                "stream": random_.random() < 0.7,
                "seed": k,
                "frequency_penalty": random_.choice((0, 0.5)),
                "pool": random_.choice(("interactive", "bulk")),
            }
            await asyncio.sleep(random_.random() * 0.5)
            admitted += 1
            with contextlib.suppress(asyncio.TimeoutError, aiohttp.ClientError):
                async with asyncio.timeout(random_.choice((0.01, 0.05, 0.2, 60))):
                    if body["stream"]:
                        await server.events("/v1/completions", body)
                    else:
                        await server.post("/v1/completions", body)

        await asyncio.gather(*(client(k) for k in range(120)))
        await server.settled()
        idle_invariants(server, assembly)
        assert {row.finish for row in server.rows} <= {"stop", "length", "abort", "refused"}
        assert "abort" in {row.finish for row in server.rows}
        outcomes = server.services.telemetry.metrics.registry.get_sample_value
        generated = sum(
            outcomes("vllm:generation_tokens_total", {"model_name": "tiny", "pool": pool}) or 0
            for pool in ("interactive", "bulk")
        )
        assert generated == sum(row.completion_tokens for row in server.rows)


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
        idle_invariants(server, assembly)
        assert "Stopping" in lines[0]
        assert len(server.rows) == 14
        with pytest.raises(aiohttp.ClientError):
            await server.get("/health")


# bug: 59
async def test_whoever_waits_too_long_is_sent_away_with_a_time_to_come_back() -> None:
    engine = msgspec.structs.replace(SMALL, max_num_seqs=1)
    pools = PoolsConfig(interactive=PoolConfig(queue_timeout_s=0.15))
    async with real_server(engine, pools=pools) as (server, assembly):
        long = {**COMPLETION, **GREEDY, "max_tokens": 450}
        busy = await server.session.post(server.url + "/v1/completions", json={**long, "stream": True})
        async with server.session.post(server.url + "/v1/completions", json=long) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "queue_timeout"
        busy.close()
        await server.settled()
        idle_invariants(server, assembly)


# bug: 15
async def test_requests_whose_clients_left_the_queue_are_never_read() -> None:
    engine = msgspec.structs.replace(SMALL, max_num_seqs=1)
    async with real_server(engine) as (server, assembly):
        long = {**COMPLETION, **GREEDY, "max_tokens": 300, "stream": True}
        busy = await server.session.post(server.url + "/v1/completions", json=long)
        left = [await server.session.post(server.url + "/v1/completions", json=long) for _ in range(20)]
        for response in left:
            response.close()
        await until(lambda: server.engine.status().streams == 1)
        busy.close()
        await server.settled()
        idle_invariants(server, assembly)
        assert sum(int(str(row["prefill_tokens"])) for row in server.services.telemetry.trace.rows(256)) <= 2
        assert [row.prompt_tokens for row in server.rows].count(0) >= 20


async def test_eight_choices_read_the_prompt_once() -> None:
    async with real_server() as (server, _):
        body = {**CHAT, "n": 6, "max_tokens": 4, "seed": 1, "include_metrics": True}
        _, reply = await server.post("/v1/chat/completions", body)
        assert len(reply["choices"]) == 6
        prefilled = sum(int(str(row["prefill_tokens"])) for row in server.services.telemetry.trace.rows(200))
        assert prefilled == reply["usage"]["prompt_tokens"]
        assert reply["metrics"]["tokens_per_second"] > 0
