"""Both wire shapes of log probabilities: raw bytes, offsets that run on, and the same values in both."""

from __future__ import annotations

import math
from typing import Any

import pytest

from minserve.request import TokenLogprob
from minserve.server.logprobs import CompletionEntries, TokenNames, chat_entries
from minserve.text.tokenizer import Tokenizer
from minserve.weights.dummy import load_dummy
from tests.server.real import ROOMY, real_server
from tests.server.serving import CHAT, COMPLETION


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_source(load_dummy("dummy").tokenizer)


def scored(text: str) -> list[TokenLogprob]:
    return [TokenLogprob(i, -1.0) for i in text.encode()]


def test_chat_entries_hold_the_tokens_own_bytes(tokenizer: Tokenizer) -> None:
    first, second = chat_entries(scored("é"), TokenNames(tokenizer))
    assert bytes(first.bytes + second.bytes).decode() == "é"
    assert first.token == "�"


def test_minus_infinity_is_written_as_openais_sentinel(tokenizer: Tokenizer) -> None:
    (entry,) = chat_entries([TokenLogprob(65, -math.inf, ((66, -math.inf),))], TokenNames(tokenizer))
    assert (entry.logprob, entry.top_logprobs[0].logprob) == (-9999.0, -9999.0)


def test_top_lists_hold_exactly_what_was_asked_for(tokenizer: Tokenizer) -> None:
    lp = TokenLogprob(65, -3.0, ((66, -0.5), (67, -1.0)))
    (entry,) = chat_entries([lp], TokenNames(tokenizer))
    assert [top.token for top in entry.top_logprobs] == ["B", "C"]
    # The other shape always has the sampled token too.
    assert CompletionEntries(TokenNames(tokenizer)).add([lp]).top_logprobs == [{"B": -0.5, "C": -1.0, "A": -3.0}]


# bug: 38
def test_of_two_tokens_with_equal_text_the_better_one_stays(tokenizer: Tokenizer) -> None:
    lp = TokenLogprob(0x80, -1.0, ((0x80, -1.0), (0x81, -2.0)))  # both read as U+FFFD
    assert CompletionEntries(TokenNames(tokenizer)).add([lp]).top_logprobs == [{"�": -1.0}]
    (entry,) = chat_entries([lp], TokenNames(tokenizer))
    assert [top.bytes for top in entry.top_logprobs] == [[0x80], [0x81]]


def test_offsets_count_characters_and_run_on_across_chunks(tokenizer: Tokenizer) -> None:
    entries = CompletionEntries(TokenNames(tokenizer))
    assert entries.add(scored("aé")).text_offset == [0, 1, 1]
    assert entries.add(scored("b")).text_offset == [2]


def test_an_echoed_prompt_has_no_probability_for_its_first_token(tokenizer: Tokenizer) -> None:
    entries = CompletionEntries(TokenNames(tokenizer))
    out = entries.prompt(list(b"Hi"), scored("i"), "Hi")
    assert out.tokens == ["H", "i"]
    assert out.token_logprobs == [None, -1.0]
    assert out.top_logprobs == [None, {"i": -1.0}]
    assert entries.add(scored("!")).text_offset == [2]


def test_special_tokens_take_no_room_unless_the_text_shows_them(tokenizer: Tokenizer) -> None:
    end = tokenizer.special_texts["<|im_end|>"]
    entries = CompletionEntries(TokenNames(tokenizer))
    assert entries.add([TokenLogprob(65, -1.0), TokenLogprob(end, -1.0), TokenLogprob(66, -1.0)]).text_offset == [
        0,
        1,
        1,
    ]
    shown = CompletionEntries(TokenNames(tokenizer))
    prompt = [65, end, 66]
    assert shown.prompt(prompt, [TokenLogprob(i, -1.0) for i in prompt[1:]], "A<|im_end|>B").text_offset == [0, 1, 11]


def test_tokens_can_be_named_by_id(tokenizer: Tokenizer) -> None:
    names = TokenNames(tokenizer, as_ids=True)
    assert CompletionEntries(names).add([TokenLogprob(65, -1.0)]).tokens == ["token_id:65"]


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
