"""Sampling fields and shared prompts, from a request to its tokens: a real (tiny, random) model under the engine.

The oracle computes every token anew: one pass over all known tokens, then the rule that the field's documentation
gives, in plain arithmetic, without seats, batches, chunks or caches.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minserve.assemble import Assembly, assemble
from minserve.backend.base import CheckpointError
from minserve.config import Config, EngineConfig, ModelConfig
from minserve.request import FinishReason
from tests.engines import PROMPT, Records, run, submission, tiny
from tests.helpers import Part, make_batch
from tests.server.real import real_server
from tests.server.serving import CHAT, COMPLETION, Server

LENGTH = 24
Next = Callable[[np.ndarray, Sequence[int]], int]  # raw logits, output so far -> the next token


@pytest.fixture(scope="module")
def logits_after() -> Callable[[Sequence[int]], np.ndarray]:
    program = tiny(max_num_batched_tokens=64).engine.runner.program

    def last_row(tokens: Sequence[int]) -> np.ndarray:
        batch = make_batch([Part(0, tokens, range(16))], block_size=4)
        row: np.ndarray = program.logits(batch)[-1]
        return row.astype(np.float64)

    return last_row


def alone(logits_after: Callable[[Sequence[int]], np.ndarray], choose: Next) -> list[int]:
    output: list[int] = []
    while len(output) < LENGTH:
        output.append(choose(logits_after([*PROMPT, *output]), output))
    return output


def penalized(presence: float, frequency: float, repetition: float) -> Next:
    """OpenAI's definition of the first two (over the output), that of Keskar et al. 2019 of the third (over all)."""

    def choose(row: np.ndarray, output: Sequence[int]) -> int:
        for token in {*PROMPT, *output}:
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        for token in set(output):
            row[token] -= presence + frequency * output.count(token)
        return int(np.argmax(row))

    return choose


# bug: 19, 39
@pytest.mark.parametrize(
    "penalties", [(0.0, 0.0, 1.3), (1.5, 0.0, 1.0), (0.0, 0.4, 1.0), (-1.0, -0.3, 1.0), (0.5, 0.2, 1.2)]
)
def test_penalties_follow_their_definition_whatever_happens_to_the_request(
    penalties: tuple[float, float, float], logits_after: Callable[[Sequence[int]], np.ndarray]
) -> None:
    presence, frequency, repetition = penalties
    expected = alone(logits_after, penalized(*penalties))
    fields: dict[str, Any] = {
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "repetition_penalty": repetition,
    }
    wanted = submission(PROMPT, "wanted", max_tokens=LENGTH, ignore_eos=True, **fields)
    assert run(tiny().engine, wanted).tokens["wanted", 0] == expected

    records = Records()
    crowded = tiny(num_blocks=20, max_num_batched_tokens=9, observers=[records]).engine
    mates = [submission([i, *PROMPT], f"m{i}", max_tokens=20, temperature=1.0, seed=i, **fields) for i in range(3)]
    got = run(crowded, *mates[:2], wanted, mates[2])
    assert sum(step.preempted for step in records.steps) > 0
    assert got.tokens["wanted", 0] == expected


def test_penalties_change_what_is_said() -> None:
    plain = run(tiny().engine, submission(PROMPT, max_tokens=LENGTH)).tokens["r", 0]
    fields: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.0},
    ]
    changed = [run(tiny().engine, submission(PROMPT, max_tokens=LENGTH, **each)).tokens["r", 0] for each in fields]
    assert plain not in changed
    assert all(len(set(tokens)) >= len(set(plain)) for tokens in changed)


def test_bias_and_lists_of_ids_follow_their_definition(
    logits_after: Callable[[Sequence[int]], np.ndarray],
) -> None:
    plain = run(tiny().engine, submission(PROMPT, max_tokens=LENGTH, ignore_eos=True)).tokens["r", 0]
    bias = {plain[0]: -100.0, plain[3]: -1.5, 65: 2.0}
    banned = frozenset(plain[:6])
    allowed = frozenset(range(97, 123))

    def biased(row: np.ndarray, _: Sequence[int]) -> int:
        for token, value in bias.items():
            row[token] += value
        return int(np.argmax(row))

    def without(row: np.ndarray, _: Sequence[int]) -> int:
        row[list(banned)] = -np.inf
        return int(np.argmax(row))

    def only(row: np.ndarray, _: Sequence[int]) -> int:
        return max(allowed - banned, key=lambda token: row[token])

    wanted: dict[str, tuple[Next, dict[str, Any]]] = {
        "bias": (biased, {"logit_bias": bias}),
        "banned": (without, {"banned_token_ids": banned}),
        "both": (only, {"banned_token_ids": banned, "allowed_token_ids": allowed}),
    }
    together = [submission(PROMPT, name, max_tokens=LENGTH, ignore_eos=True, **f) for name, (_, f) in wanted.items()]
    got = run(tiny(max_num_batched_tokens=8).engine, *together, submission(PROMPT, max_tokens=LENGTH, ignore_eos=True))
    for name, (choose, _) in wanted.items():
        assert got.tokens[name, 0] == alone(logits_after, choose), name
    assert got.tokens["r", 0] == plain


def test_no_end_token_comes_before_min_tokens() -> None:
    plain = run(tiny().engine, submission(PROMPT, max_tokens=LENGTH, ignore_eos=True)).tokens["r", 0]
    ends = frozenset(plain[:4])
    early = run(tiny().engine, submission(PROMPT, max_tokens=LENGTH, stop_token_ids=ends))
    assert len(early.tokens["r", 0]) == 1
    late = run(tiny().engine, submission(PROMPT, max_tokens=LENGTH, stop_token_ids=ends, min_tokens=5))
    assert len(late.tokens["r", 0]) >= 5
    assert ends.isdisjoint(late.tokens["r", 0][:5])


def test_lower_priority_goes_first() -> None:
    engine = tiny(max_num_seqs=1).engine
    waiting = [submission([i, *PROMPT], f"p{priority}") for i, priority in enumerate((3, 0, 7, -2))]
    waiting = [replace(s, priority=int(s.id[1:])) for s in waiting]
    got = run(engine, *waiting)
    arrived = {o.group: o.arrival + o.queue for o in got.outcomes.values()}
    assert sorted(arrived, key=arrived.__getitem__) == ["p-2", "p0", "p3", "p7"]
    assert {o.finish for o in got.outcomes.values()} == {FinishReason.LENGTH}


def with_template(path: Path) -> Assembly:
    engine = EngineConfig(backend="numpy", num_blocks=16)
    return assemble(Config(model=ModelConfig(name="dummy", chat_template=str(path)), engine=engine))


def test_a_template_of_ones_own_replaces_the_models(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}", encoding="utf-8")
    assert with_template(path).template.render([{"role": "user", "content": "Hi"}]) == "[user] Hi\n"


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"{% for m in %}"])
def test_a_template_that_is_none_is_said_before_weights_are_loaded(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bad.jinja"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr("minserve.assemble.create_backend", None)
    with pytest.raises(CheckpointError, match="template"):
        with_template(path)


# -- prompts that are read once


ROOMY = EngineConfig(backend="numpy", num_blocks=256, block_size=16, max_num_seqs=8, max_num_batched_tokens=256)


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


# -- log probabilities


async def test_both_wire_shapes_and_echo_give_the_same_log_probabilities() -> None:
    async with real_server(ROOMY) as (server, assembly):
        messages: Any = CHAT["messages"]
        ids = assembly.template.encode(messages)
        fields: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        fields["return_tokens_as_token_ids"] = True  # bytes that are no character would all be named alike
        _, chat = await server.post("/v1/chat/completions", {**CHAT, **fields, "logprobs": True, "top_logprobs": 2})
        _, plain = await server.post("/v1/completions", {**COMPLETION, **fields, "prompt": ids, "logprobs": 2})
        entries, lists = chat["choices"][0]["logprobs"]["content"], plain["choices"][0]["logprobs"]
        assert chat["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
        values = [entry["logprob"] for entry in entries]
        assert values == [entry["top_logprobs"][0]["logprob"] for entry in entries]
        assert lists["token_logprobs"] == pytest.approx(values, abs=1e-4)
        assert [entry["token"] for entry in entries] == lists["tokens"]
        for entry, top in zip(entries, lists["top_logprobs"], strict=True):
            assert list(top) == [each["token"] for each in entry["top_logprobs"]]
            assert list(top.values()) == pytest.approx([each["logprob"] for each in entry["top_logprobs"]], abs=1e-4)
        known = [*ids, *plain["choices"][0]["token_ids"]]
        echo = {**COMPLETION, "prompt": known, "echo": True, "logprobs": 0, "max_tokens": 0}
        _, scored = await server.post("/v1/completions", echo)
        again = scored["choices"][0]["logprobs"]["token_logprobs"]
        assert again[0] is None
        assert again[len(ids) :] == pytest.approx(values, abs=1e-4)


async def test_penalties_and_bias_do_not_touch_log_probabilities() -> None:
    async with real_server(ROOMY) as (server, _):
        body = {**COMPLETION, "max_tokens": 1, "temperature": 0, "logprobs": 3}
        _, plain = await server.post("/v1/completions", body)
        changed = {**body, "logit_bias": {"65": 100}, "repetition_penalty": 1.5, "top_p": 0.1}
        _, biased = await server.post("/v1/completions", changed)
        assert biased["choices"][0]["text"] == "A"
        before, after = (reply["choices"][0]["logprobs"]["top_logprobs"][0] for reply in (plain, biased))
        assert {token: after[token] for token in before} == before
        assert after["A"] < min(before.values())


@pytest.mark.parametrize(
    ("seats", "length", "said"),
    [
        (2, 64, "64 blocks of 8 tokens: 2 requests of 64 tokens at once"),
        (6, 256, "64 blocks of 8 tokens: 2 requests of 256 tokens at once, or 6 of 85"),
    ],
)
def test_the_capacity_is_said_once_where_every_seat_has_its_full_length(seats: int, length: int, said: str) -> None:
    engine = EngineConfig(backend="numpy", num_blocks=64, block_size=8, max_num_seqs=seats, max_model_len=length)
    assert assemble(Config(model=ModelConfig(name="dummy:llama-tiny"), engine=engine)).capacity() == said
