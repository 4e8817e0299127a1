"""HTTP over the real engine: what must hold with chunks, caches and stop strings underneath."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.server.real import GREEDY, idle_invariants, real_server
from tests.server.serving import CHAT, COMPLETION, keyed


async def test_streaming_and_whole_answers_agree_whatever_shares_the_batch() -> None:
    async with real_server() as (server, _):
        bodies = [{**COMPLETION, **GREEDY, "prompt": "word " * i, "max_tokens": 20} for i in range(1, 9)]
        alone = [(await server.post("/v1/completions", body))[1]["choices"][0]["text"] for body in bodies]
        together = await asyncio.gather(*(server.post("/v1/completions", body) for body in bodies))
        assert [reply["choices"][0]["text"] for _, reply in together] == alone
        streams = await asyncio.gather(*(server.events("/v1/completions", body) for body in bodies))
        assert [streamed_text(text) for text in streams] == alone
        idle_invariants(server)


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


async def test_eight_choices_read_the_prompt_once() -> None:
    async with real_server() as (server, _):
        body = {**CHAT, "n": 6, "max_tokens": 4, "seed": 1, "include_metrics": True}
        _, reply = await server.post("/v1/chat/completions", body)
        assert len(reply["choices"]) == 6
        prefilled = sum(int(str(row["prefill_tokens"])) for row in server.services.telemetry.trace.rows(200))
        assert prefilled == reply["usage"]["prompt_tokens"]
        assert reply["metrics"]["tokens_per_second"] > 0
