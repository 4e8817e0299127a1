"""Text of tokens that come a few at a time: whole characters, and nothing of the prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.text.detokenize import Detokenizer
from minserve.text.tokenizer import Tokenizer
from tests.text.builders import byte_tokenizer, sentencepiece_tokenizer

BYTES = byte_tokenizer()


def byte_ids(data: bytes) -> list[int]:
    """One token per byte (the builder puts the bytes after three special tokens)."""
    return [3 + byte for byte in data]


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, cuts: int = 1) -> list[str]:
    """The text pieces when `cuts` tokens arrive at a time; the last one is the flush."""
    detokenizer = Detokenizer(tokenizer, prompt or [])
    pieces = [detokenizer.push(ids[i : i + cuts]) for i in range(0, len(ids), cuts)]
    return [*pieces, detokenizer.flush()]


# bug: 2
@pytest.mark.parametrize("text", ["😀", "ď", "👨‍👩‍👧‍👦", "日本", "a😀b"])
def test_characters_split_over_tokens_come_out_whole(text: str) -> None:
    pieces = stream(BYTES, byte_ids(text.encode()))
    assert "".join(pieces) == text
    assert all(piece in text for piece in pieces)


def test_a_character_is_held_until_its_last_byte_and_no_longer() -> None:
    assert stream(BYTES, byte_ids("é€😀x".encode())) == ["", "é", "", "", "€", "", "", "", "😀", "x", ""]


# bug: 4
@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        (b"a\x85b", ["a", "\ufffd", "b", ""]),
        (b"a\xa1", ["a", "\ufffd", ""]),
        (b"\xe6\x97x", ["", "", "\ufffdx", ""]),
        (b"\xf0\x9f\x98", ["", "", "", "\ufffd"]),
        (b"\xff\xfe", ["\ufffd", "\ufffd", ""]),
    ],
)
def test_invalid_bytes_become_replacement_characters_in_place(data: bytes, pieces: list[str]) -> None:
    assert stream(BYTES, byte_ids(data)) == pieces


# bug: 1
@pytest.mark.parametrize(
    ("output", "text"),
    [
        (b"A", "A"),  # the prompt's half character leaves no trace
        (b"\xadA", "中A"),  # the output finishes it
        (b"", ""),
        (b"\xff", "\ufffd"),
    ],
)
def test_a_prompt_ending_in_half_a_character_is_not_printed(output: bytes, text: str) -> None:
    prompt = byte_ids(b"Hi " + "中".encode()[:2])
    assert "".join(stream(BYTES, byte_ids(output), prompt)) == text


def test_a_prompts_text_is_never_printed() -> None:
    assert "".join(stream(BYTES, BYTES.encode(" world"), BYTES.encode("Hello"))) == " world"


def test_special_tokens_have_no_text() -> None:
    ids = [1, *BYTES.encode("Hello"), 2, *BYTES.encode(" world"), 0]
    assert "".join(stream(BYTES, ids)) == "Hello world" == BYTES.decode(ids)


# bug: 5
@pytest.mark.parametrize("tokens", [["▁"], ["▁", "the"], ["the", "▁"], ["▁", "▁"], ["<s>", "▁", "the"]])
def test_the_space_that_sentencepiece_puts_first_is_dropped_once(tokens: list[str]) -> None:
    tokenizer = sentencepiece_tokenizer(space_prefix=True)
    ids = [i for i in (tokenizer.token_id(token) for token in tokens) if i is not None]
    whole = "".join(tokens).replace("<s>", "").replace("▁", " ")
    assert len(ids) == len(tokens)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == whole.removeprefix(" ")
    assert "".join(stream(tokenizer, ids, [1])) == whole.removeprefix(" ")  # right after a special token
    assert "".join(stream(tokenizer, ids, [1, *tokenizer.encode("so")])) == whole  # text goes on: a real space


# bug: 5
def test_byte_level_spaces_are_never_stripped() -> None:
    ids = BYTES.encode(" the the")
    assert "".join(stream(BYTES, ids)) == BYTES.decode(ids) == " the the"


@given(ids=st.lists(st.integers(0, BYTES.vocab_size + 3)), cuts=st.integers(1, 5))
def test_streaming_equals_decoding_at_once(ids: list[int], cuts: int) -> None:
    assert "".join(stream(BYTES, ids, cuts=cuts)) == BYTES.decode(ids)
    known = [i for i in ids if i < BYTES.vocab_size and not 0 <= i < 3]
    assert BYTES.decode(known) == BYTES._library.decode(known)


@given(ids=st.lists(st.integers(0, 700)), cuts=st.integers(1, 5), space_prefix=st.booleans())
def test_streaming_equals_decoding_at_once_for_sentencepiece(ids: list[int], cuts: int, space_prefix: bool) -> None:
    tokenizer = sentencepiece_tokenizer(space_prefix)
    text = tokenizer.decode(ids)
    assert "".join(stream(tokenizer, ids, cuts=cuts)) == text
    plain = [i for i in ids if 5 <= i < tokenizer.vocab_size]
    if "\ufffd" not in (decoded := tokenizer.decode(plain)):  # the library replaces whole runs of byte tokens
        assert decoded == tokenizer._library.decode(plain)


@given(ids=st.lists(st.integers(0, 49151)), prompt=st.lists(st.integers(0, 49151)))
def test_smollm2_streams_what_it_decodes(smollm2_tokenizer: Tokenizer, ids: list[int], prompt: list[int]) -> None:
    assert "".join(stream(smollm2_tokenizer, ids)) == smollm2_tokenizer.decode(ids)
    plain = [i for i in ids if i not in smollm2_tokenizer.special_ids]
    assert smollm2_tokenizer.decode(plain) == smollm2_tokenizer._library.decode(plain)
    continued = "".join(stream(smollm2_tokenizer, ids, prompt))
    before, whole = smollm2_tokenizer.decode(prompt), smollm2_tokenizer.decode(prompt + ids)
    assert whole.removeprefix(before.rstrip("\ufffd")).lstrip("\ufffd").endswith(continued.lstrip("\ufffd"))
