"""Prompts that several choices or calls have in common are read once: by the metrics' count, and by the steps'."""

from __future__ import annotations

import asyncio
import re

from tests.server.real import ROOMY, real_server
from tests.server.serving import CHAT, COMPLETION, Server


async def prefilled(server: Server) -> tuple[int, int]:
    """Prompt tokens that were computed: by the counters of /metrics, and by the steps."""
    async with server.session.get(server.url + "/metrics") as response:
        page = await response.text()
    processed, cached = (
        sum(float(value) for value in re.findall(rf"^vllm:{name}_total{{.*}} (\S+)$", page, re.MULTILINE))
        for name in ("prompt_tokens", "prompt_tokens_cached")
    )
    steps = server.services.telemetry.trace.rows(256)
    return round(processed - cached), sum(int(str(row["prefill_tokens"])) for row in steps)


async def test_eight_choices_cost_one_prefill() -> None:
    async with real_server(ROOMY) as (server, _):
        body = {**COMPLETION, "prompt": "x" * 300, "n": 8, "temperature": 1, "seed": 3, "max_tokens": 8}
        status, reply = await server.post("/v1/completions", body)
        assert status == 200
        assert len({choice["text"] for choice in reply["choices"]}) > 1
        assert reply["usage"]["prompt_tokens"] == 300
        assert await prefilled(server) == (300, 300)


async def test_eight_cold_calls_with_one_system_prompt_read_it_once() -> None:
    system = {"role": "system", "content": "s" * (512 - len("<|im_start|>system\n") + 12)}  # markers are one token each
    async with real_server(ROOMY) as (server, assembly):
        talks = [[system, {"role": "user", "content": f"{k} is my number"}] for k in range(8)]
        tokens = [assembly.template.encode(talk) for talk in talks]
        shared = next(i for i, column in enumerate(zip(*tokens, strict=False)) if len(set(column)) > 1) // 16 * 16
        assert shared >= 512
        bodies = [{**CHAT, "messages": talk, "max_tokens": 2} for talk in talks]
        replies = await asyncio.gather(*(server.post("/v1/chat/completions", body) for body in bodies))
        assert [status for status, _ in replies] == [200] * 8
        cached = sorted(reply["usage"]["prompt_tokens_details"]["cached_tokens"] for _, reply in replies)
        assert cached == [0] + [shared] * 7
        computed = sum(map(len, tokens)) - 7 * shared
        assert await prefilled(server) == (computed, computed)
