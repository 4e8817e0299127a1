"""Calls that queue for the real engine: a full queue, a wait that is too long, clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import random

import aiohttp
import msgspec

from minserve.config import AccountConfig, PoolConfig, PoolsConfig
from tests.server.real import GREEDY, SMALL, idle_invariants, real_server, until
from tests.server.serving import COMPLETION


async def test_a_call_that_fills_the_queue_alone_runs_where_nobody_waits() -> None:
    body = {**COMPLETION, **GREEDY, "prompt": ["a", "b", "c"], "n": 2, "max_tokens": 3}
    async with real_server(max_queue=4) as (server, _):
        status, reply = await server.post("/v1/completions", body)
        assert (status, len(reply["choices"])) == (200, 6)
        idle_invariants(server)


async def test_a_call_that_a_full_queue_refuses_is_refused_in_its_row_and_in_the_metrics() -> None:
    body = {**COMPLETION, **GREEDY, "prompt": ["a", "b"], "max_tokens": 100}
    async with real_server(msgspec.structs.replace(SMALL, max_num_seqs=1), max_queue=1) as (server, _):
        first = asyncio.create_task(server.post("/v1/completions", body))
        await until(lambda: sum(server.engine.status().waiting.values()) > 0)
        status, reply = await server.post("/v1/completions", body)
        assert (status, reply["error"]["code"]) == (503, "queue_full")
        assert [(row.finish, row.status, row.cost) for row in server.rows] == [("refused", 503, 0)]
        async with server.session.get(server.url + "/metrics") as response:
            assert 'vllm:admission_rejections_total{model_name="tiny",reason="queue_full"} 1.0' in await response.text()
        assert (await first)[0] == 200
        idle_invariants(server)


# bug: 13
async def test_a_non_streaming_client_that_leaves_frees_everything_within_a_few_steps() -> None:
    async with real_server() as (server, _):
        body = {**COMPLETION, **GREEDY, "max_tokens": 400}
        task = asyncio.create_task(server.post("/v1/completions", body))
        await until(lambda: any(server.engine.status().running.values()))
        task.cancel()
        await server.settled()
        idle_invariants(server)
        (row,) = server.rows
        assert (row.status, row.finish) == (499, "abort")
        assert 0 <= row.completion_tokens < 400


# bug: 18
# bug: 60
async def test_random_clients_that_leave_at_random_moments_leave_nothing_behind() -> None:
    random_ = random.Random(5)
    async with real_server(max_queue=200, local=AccountConfig(pools=("bulk",))) as (server, _):
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
        idle_invariants(server)
        assert {row.finish for row in server.rows} <= {"stop", "length", "abort", "refused"}
        assert "abort" in {row.finish for row in server.rows}
        outcomes = server.services.telemetry.metrics.registry.get_sample_value
        generated = sum(
            outcomes("vllm:generation_tokens_total", {"model_name": "tiny", "pool": pool}) or 0
            for pool in ("interactive", "bulk")
        )
        assert generated == sum(row.completion_tokens for row in server.rows)


# bug: 59
async def test_whoever_waits_too_long_is_sent_away_with_a_time_to_come_back() -> None:
    engine = msgspec.structs.replace(SMALL, max_num_seqs=1)
    pools = PoolsConfig(interactive=PoolConfig(queue_timeout_s=0.15))
    async with real_server(engine, pools=pools) as (server, _):
        long = {**COMPLETION, **GREEDY, "max_tokens": 450}
        busy = await server.session.post(server.url + "/v1/completions", json={**long, "stream": True})
        async with server.session.post(server.url + "/v1/completions", json=long) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "queue_timeout"
        busy.close()
        await server.settled()
        idle_invariants(server)


# bug: 15
async def test_requests_whose_clients_left_the_queue_are_never_read() -> None:
    engine = msgspec.structs.replace(SMALL, max_num_seqs=1)
    async with real_server(engine) as (server, _):
        long = {**COMPLETION, **GREEDY, "max_tokens": 300, "stream": True}
        busy = await server.session.post(server.url + "/v1/completions", json=long)
        left = [await server.session.post(server.url + "/v1/completions", json=long) for _ in range(20)]
        for response in left:
            response.close()
        await until(lambda: server.engine.status().streams == 1)
        busy.close()
        await server.settled()
        idle_invariants(server)
        assert sum(int(str(row["prefill_tokens"])) for row in server.services.telemetry.trace.rows(256)) <= 2
        assert [row.prompt_tokens for row in server.rows].count(0) >= 20
