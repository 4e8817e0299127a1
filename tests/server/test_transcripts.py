"""What a client reads, byte for byte: streams and whole answers of both endpoints."""

from __future__ import annotations

import json
import re

from minserve.config import PricesConfig
from minserve.request import FinishReason, TextDelta, Usage
from tests.server.fakes import FakeEngine, say
from tests.server.serving import CHAT, COMPLETION, serving


def normal(text: str) -> str:
    """Ids and times are the only parts that differ between runs; they must be equal all over one answer."""
    ids = set(re.findall(r'"id":"((?:chat)?cmpl-[0-9a-f]{24})"', text))
    times = set(re.findall(r'"created":(\d+)', text))
    assert len(ids) == 1
    assert len(times) == 1
    return text.replace(ids.pop(), "ID").replace(f'"created":{times.pop()}', '"created":1')


HEAD = '{"id":"ID","object":"chat.completion.chunk","created":1,"model":"tiny",'

CHAT_STREAM = f"""\
: queued 0

data: {HEAD}"choices":[{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]}}

data: {HEAD}"choices":[{{"index":0,"delta":{{"content":"H"}},"logprobs":null,"finish_reason":null}}]}}

data: {HEAD}"choices":[{{"index":0,"delta":{{"content":"é"}},"logprobs":null,"finish_reason":null}}]}}

data: {HEAD}"choices":[{{"index":0,"delta":{{"content":"\\u2028"}},"logprobs":null,"finish_reason":null}}]}}

data: {HEAD}"choices":[{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"stop","stop_reason":null}}]}}

data: [DONE]

"""


# bug: 51
async def test_a_chat_stream() -> None:
    async with serving(FakeEngine(say("Hé\u2028"))) as server:
        assert normal(await server.events("/v1/chat/completions", CHAT)) == CHAT_STREAM


# bug: 54
async def test_usage_comes_only_when_asked_for_and_then_null_stands_on_every_other_chunk() -> None:
    async with serving(FakeEngine(say("H", cached=3))) as server:
        body = {**CHAT, "stream_options": {"include_usage": True}}
        chunks = events(await server.events("/v1/chat/completions", body))
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 3
        assert chunks[-1]["choices"] == []
        prompt = len(server.engine.submissions[0].prompt)
        assert chunks[-1]["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": 1,
            "total_tokens": prompt + 1,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        for options in ({"include_usage": False}, {"include_usage": None}, None):
            chunks = events(await server.events("/v1/chat/completions", {**CHAT, "stream_options": options}))
            assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


async def test_a_stream_says_what_it_may_cost_and_in_the_end_what_it_cost() -> None:
    prices = PricesConfig(prefill=1.0, cached=0.5, decode=2.0)
    async with serving(FakeEngine(say("abc", cached=1)), prices=prices) as server:
        body = {**COMPLETION, "prompt": ["Hi", "Ho"], "n": 2, "max_tokens": 10, "stream": True}
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        async with server.session.post(server.url + "/v1/completions", json=body) as response:
            assert response.headers["x-minserve-reserved-cost"] == "0.000084"  # 4 tokens read, 40 written
            chunks = events(await response.text())
        (row,) = server.rows
    assert [chunk["usage"].get("cost") for chunk in chunks if "cost" in chunk["usage"]] == [row.cost / 10**9]
    assert chunks[-1]["usage"]["cost"] == 0.000027  # 2 tokens read, 2 found, 12 written


async def test_running_usage_counts_up() -> None:
    async with serving(FakeEngine(say("abc"))) as server:
        body = {**COMPLETION, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        chunks = events(await server.events("/v1/completions", body))
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3, 3]
        assert ["prompt_tokens_details" in chunk["usage"] for chunk in chunks] == [False] * 4 + [True]


async def test_running_usage_counts_only_together_with_usage() -> None:
    async with serving(FakeEngine(say("abc"))) as server:
        for asked in ({}, {"include_usage": False}, {"include_usage": None}):
            body = {**COMPLETION, "stream_options": {**asked, "continuous_usage_stats": True}}
            chunks = events(await server.events("/v1/completions", body))
            assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


COMPLETION_STREAM = """\
: queued 0

data: {"id":"ID","object":"text_completion","created":1,"model":"tiny","choices":[{"index":0,"text":"H","logprobs":null,"finish_reason":null}]}

data: {"id":"ID","object":"text_completion","created":1,"model":"tiny","choices":[{"index":0,"text":"i","logprobs":null,"finish_reason":null}]}

data: {"id":"ID","object":"text_completion","created":1,"model":"tiny","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null}]}

data: [DONE]

"""  # noqa: E501


async def test_a_completion_stream() -> None:
    async with serving(FakeEngine(say("Hi there"))) as server:
        text = await server.events("/v1/completions", {**COMPLETION, "max_tokens": 2})
        assert normal(text) == COMPLETION_STREAM


async def test_a_whole_chat_answer() -> None:
    async with serving(FakeEngine(say("Hello", cached=2))) as server:
        async with server.session.post(server.url + "/v1/chat/completions", json=CHAT) as response:
            assert response.content_type == "application/json"
            text = normal(await response.text())
        prompt = len(server.engine.submissions[0].prompt)
    assert text == (
        '{"id":"ID","object":"chat.completion","created":1,"model":"tiny","choices":[{"index":0,"message":{"role":'
        '"assistant","content":"Hello","refusal":null},"logprobs":null,"finish_reason":"stop","stop_reason":null}],'
        f'"usage":{{"prompt_tokens":{prompt},"completion_tokens":5,"total_tokens":{prompt + 5},'
        '"prompt_tokens_details":{"cached_tokens":2}}}'
    )


async def test_a_whole_completion() -> None:
    async with serving(FakeEngine(say("Hello"))) as server:
        _, body = await server.post("/v1/completions", COMPLETION)
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert body["usage"]["completion_tokens"] == 5


# bug: 53
async def test_every_choice_has_its_own_role_and_finish() -> None:
    async with serving(FakeEngine(say("ab"))) as server:
        chunks = events(await server.events("/v1/chat/completions", {**CHAT, "n": 3}))
    for index in range(3):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == "ab"
        assert [choice["finish_reason"] for choice in own] == [None, None, None, "stop"]


# bug: 53
async def test_choices_that_end_at_different_times_stay_apart() -> None:
    engine = FakeEngine(None)
    async with (
        serving(engine) as server,
        server.session.post(server.url + "/v1/completions", json={**COMPLETION, "n": 2, "stream": True}) as response,
    ):
        stream = await engine.stream()
        stream.push(TextDelta(1, "b"), TextDelta(0, "a"))
        stream.push(TextDelta(1, finish=FinishReason.STOP, stop_reason="!", usage=Usage(2, 0, 1)))
        stream.push(TextDelta(0, "A"))
        stream.push(TextDelta(0, finish=FinishReason.LENGTH, usage=Usage(2, 0, 2)))
        chunks = events(await response.text())
    seen = [(c["index"], c["text"], c["finish_reason"]) for chunk in chunks for c in chunk["choices"]]
    assert seen == [(1, "b", None), (0, "a", None), (1, "", "stop"), (0, "A", None), (0, "", "length")]
    assert next(c for chunk in chunks for c in chunk["choices"] if c["finish_reason"] == "stop")["stop_reason"] == "!"


async def test_several_prompts_are_numbered_prompt_by_prompt() -> None:
    async with serving(FakeEngine(lambda s: say(bytes(s.prompt).decode())(s))) as server:
        body = {**COMPLETION, "prompt": ["ab", "cd"], "n": 2}
        _, whole = await server.post("/v1/completions", body)
        assert [(c["index"], c["text"]) for c in whole["choices"]] == [(0, "ab"), (1, "ab"), (2, "cd"), (3, "cd")]
        assert whole["usage"]["prompt_tokens"] == 4  # once per prompt, not once per choice
        assert whole["usage"]["completion_tokens"] == 8
        chunks = events(await server.events("/v1/completions", body))
        texts = dict.fromkeys(range(4), "")
        for choice in (c for chunk in chunks for c in chunk["choices"]):
            texts[choice["index"]] += choice["text"]
        assert texts == {0: "ab", 1: "ab", 2: "cd", 3: "cd"}


async def test_chat_logprobs_stream_with_their_tokens() -> None:
    async with serving(FakeEngine(say("ab"))) as server:
        body = {**CHAT, "logprobs": True, "top_logprobs": 2}
        chunks = events(await server.events("/v1/chat/completions", body))
        entries = [
            entry for chunk in chunks for c in chunk["choices"] if c["logprobs"] for entry in c["logprobs"]["content"]
        ]
        assert [entry["token"] for entry in entries] == ["a", "b"]
        assert entries[0]["top_logprobs"] == [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -2.0, "bytes": [98]},
        ]
        _, whole = await server.post("/v1/chat/completions", body)
        assert whole["choices"][0]["logprobs"] == {"content": entries, "refusal": None}


# bug: 42
async def test_echo_with_max_tokens_0_scores_the_prompt() -> None:
    async with serving(FakeEngine(say("unused"))) as server:
        body = {**COMPLETION, "prompt": "Hey", "echo": True, "max_tokens": 0, "logprobs": 1}
        _, whole = await server.post("/v1/completions", body)
        choice = whole["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("Hey", "length")
        assert choice["logprobs"] == {
            "tokens": ["H", "e", "y"],
            "token_logprobs": [None, -1.0, -1.0],
            "top_logprobs": [None, {"e": -1.0}, {"y": -1.0}],
            "text_offset": [0, 1, 2],
        }
        assert whole["usage"]["completion_tokens"] == 0
        chunks = events(await server.events("/v1/completions", body))
        assert [c["text"] for chunk in chunks for c in chunk["choices"]] == ["Hey", ""]
        _, plain = await server.post("/v1/completions", {**COMPLETION, "max_tokens": 0})
        assert (plain["choices"][0]["text"], plain["choices"][0]["finish_reason"]) == ("", "length")


async def test_echo_with_logprobs_goes_on_with_the_answers_offsets() -> None:
    async with serving(FakeEngine(say("!?"))) as server:
        body = {**COMPLETION, "prompt": [72, 105], "echo": True, "logprobs": 0, "n": 2}
        _, whole = await server.post("/v1/completions", body)
        for choice in whole["choices"]:
            assert choice["text"] == "Hi!?"
            assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
            assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -0.5, -0.5]


async def test_token_ids_come_back_when_asked_for() -> None:
    async with serving(FakeEngine(say("ab"))) as server:
        _, whole = await server.post("/v1/completions", {**COMPLETION, "return_token_ids": True})
        assert whole["choices"][0]["token_ids"] == [97, 98]
        assert whole["choices"][0]["prompt_token_ids"] == [72, 105]
        chunks = events(await server.events("/v1/chat/completions", {**CHAT, "return_token_ids": True}))
        assert chunks[0]["prompt_token_ids"] == list(server.engine.submissions[-1].prompt)
        ids = [i for chunk in chunks for c in chunk["choices"] for i in c.get("token_ids", [])]
        assert ids == [97, 98]
        assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])


async def test_metrics_have_vllms_names_and_meanings() -> None:
    expected = {
        "queue_time_ms": 250.0,
        "time_to_first_token_ms": 250.0,
        "generation_time_ms": 1000.0,
        "mean_itl_ms": 500.0,
        "tokens_per_second": 1.6,
    }
    async with serving(FakeEngine(say("ab"))) as server:
        _, whole = await server.post("/v1/chat/completions", {**CHAT, "include_metrics": True})
        assert whole["metrics"] == expected
        chunks = events(await server.events("/v1/completions", {**COMPLETION, "include_metrics": True}))
        assert (chunks[-1]["choices"], chunks[-1]["metrics"]) == ([], expected)
        assert "usage" not in chunks[-1]


def events(text: str) -> list[dict]:
    """The JSON events of a stream, which ends with one [DONE]."""
    lines = [line for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    assert lines.count("data: [DONE]") == 1
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
