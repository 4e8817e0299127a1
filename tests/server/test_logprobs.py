"""Both wire shapes of log probabilities, with raw bytes and offsets that run on."""

from __future__ import annotations

import math

import pytest

from minserve.request import TokenLogprob
from minserve.server.logprobs import CompletionEntries, TokenNames, chat_entries
from minserve.text.tokenizer import Tokenizer
from minserve.weights.dummy import load_dummy


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
