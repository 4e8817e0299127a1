"""Text to ids and back, for both kinds of vocabulary."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from minserve.backend.base import CheckpointError
from minserve.request import RequestError
from minserve.text.rebuild import gguf_document
from minserve.text.tokenizer import Tokenizer
from minserve.weights.dummy import byte_tokenizer as dummy_source
from minserve.weights.vocabulary import GgufVocabulary, TokenizerJson, byte_alphabet
from tests.text.builders import SPECIAL, byte_tokenizer, byte_vocabulary, sentencepiece_golden, sentencepiece_tokenizer

CHATTY = "<|im_start|>user\nHello world<|im_end|>"


def as_json(vocabulary: GgufVocabulary, **changes: Any) -> TokenizerJson:
    return TokenizerJson(json.dumps({**gguf_document(vocabulary), **changes}).encode(), eos_token=SPECIAL[2])


# bug: 73
def test_special_tokens_in_text_are_plain_characters() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(CHATTY)
    assert not tokenizer.special_ids & set(ids)
    assert tokenizer.decode(ids) == CHATTY


def test_special_tokens_are_found_where_they_are_allowed() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(CHATTY, allow_special=True)
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "user\nHello world"
    assert tokenizer.decode(ids, skip_special=False) == CHATTY


def test_plain_and_special_encoding_do_not_disturb_each_other_across_threads() -> None:
    tokenizer = byte_tokenizer()
    plain, special = tokenizer.encode(CHATTY), tokenizer.encode(CHATTY, allow_special=True)
    wrong: list[str] = []

    def work(allow: bool) -> None:
        for _ in range(300):
            if tokenizer.encode(CHATTY, allow_special=allow) != (special if allow else plain):
                wrong.append("special" if allow else "plain")

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@given(st.text())
def test_any_text_survives_a_byte_level_round_trip(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not tokenizer.special_ids & set(ids)


@given(st.text(), st.booleans())
def test_any_text_survives_a_sentencepiece_round_trip(text: str, space_prefix: bool) -> None:
    tokenizer = sentencepiece_tokenizer(space_prefix)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text.replace("\u2581", " ")  # SentencePiece has one character for both
    assert not tokenizer.special_ids & set(ids)


def test_bos_is_added_only_where_the_tokenizer_wants_one() -> None:
    assert byte_tokenizer().encode("Hello", bos=True) == byte_tokenizer().encode("Hello")
    wants = byte_tokenizer(add_bos=True)
    assert wants.encode("Hello", bos=True) == [1, *wants.encode("Hello")]


def test_a_post_processor_says_whether_texts_start_with_bos() -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": SPECIAL[1], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {SPECIAL[1]: {"id": SPECIAL[1], "ids": [1], "tokens": [SPECIAL[1]]}},
    }
    source = as_json(byte_vocabulary(), post_processor=template)
    assert Tokenizer.from_source(source).encode("Hello", bos=True)[0] == 1
    told = Tokenizer.from_source(replace(source, add_bos=False))
    assert told.bos_id == 1
    assert told.encode("Hello", bos=True) == told.encode("Hello")


def test_text_after_a_special_token_gets_no_space_where_only_the_first_word_is_marked() -> None:
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    vocabulary = sentencepiece_golden(True).vocabulary
    source = as_json(vocabulary, normalizer=None, pre_tokenizer=metaspace)
    tokenizer = Tokenizer.from_source(replace(source, eos_token="</s>"))
    library = tokenizers.Tokenizer.from_str(source.data.decode())
    for text in ("the band", "<s>the band</s> the", "a<end_of_turn>the"):
        assert tokenizer.encode(text, allow_special=True) == library.encode(text, add_special_tokens=False).ids, text


def test_special_tokens_that_strip_white_space_do_so() -> None:
    document = gguf_document(byte_vocabulary())
    document["added_tokens"][2]["rstrip"] = True
    tokenizer = Tokenizer(document)
    library = tokenizers.Tokenizer.from_str(json.dumps(document))
    text = "Hello<|im_end|> \n the world"
    ids = tokenizer.encode(text, allow_special=True)
    assert ids == library.encode(text).ids
    assert tokenizer.decode(ids) == "Hellothe world"


def test_turn_markers_are_special_even_if_the_file_forgot_and_think_tags_are_text() -> None:
    document = gguf_document(byte_vocabulary())
    for token in document["added_tokens"]:
        token["special"] = not token["special"]
    tokenizer = Tokenizer(document)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode(tokenizer.encode("<think>")) == "<think>"
    assert len(tokenizer.encode("<think>")) == 1


def test_html_tags_that_look_like_control_tokens_are_text() -> None:
    vocabulary = byte_vocabulary()
    tokens = [*vocabulary.tokens[:-2], "<s>", "</s>"]  # user-defined, as in gemma
    tokenizer = Tokenizer.from_source(replace(vocabulary, tokens=tokens))
    assert tokenizer.decode(tokenizer.encode("<s>old</s>")) == "<s>old</s>"
    assert tokenizer.end_ids == {0, 2}


def test_ends_are_what_the_file_says_and_the_known_names() -> None:
    assert byte_tokenizer().end_ids == {0, 2}
    assert Tokenizer.from_source(replace(byte_vocabulary(), end_ids=frozenset({7}))).end_ids == {0, 2, 7}


def test_token_bytes_are_the_raw_bytes_and_nothing_outside_the_vocabulary() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.token_bytes(tokenizer.token_id("ðŁ") or 0) == b"\xf0\x9f"
    assert tokenizer.token_bytes(1) == b"<|im_start|>"
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert sentencepiece_tokenizer().token_bytes(sentencepiece_tokenizer().token_id("<0x0A>") or 0) == b"\n"


def test_the_dummy_models_tokenizer_can_be_read() -> None:
    tokenizer = Tokenizer.from_source(dummy_source())
    assert tokenizer.decode(tokenizer.encode("Hello, 日本")) == "Hello, 日本"
    assert tokenizer.end_ids


# bug: 71
def test_half_a_surrogate_pair_is_a_bad_request() -> None:
    with pytest.raises(RequestError, match="surrogate") as caught:
        byte_tokenizer().encode("a\ud83d")
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 100_000,
        b'{"model": {}}',
        b'{"model": {"type": "BPE"}}',
        b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
        b'{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}',
        b'{"model": {"type": "BPE", "vocab": {"a": 4294967295}, "merges": []}, "decoder": {"type": "ByteLevel"}}',
        b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": [1]}',
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": 7}',
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "decoder": {"type": "WordPiece"}}',
    ],
)
def test_a_damaged_tokenizer_json_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_source(TokenizerJson(data))


@pytest.mark.parametrize("token", ["<nope>", "", "\ud83d"])
def test_a_bos_token_outside_the_vocabulary_is_refused(token: str) -> None:
    source = as_json(byte_vocabulary())
    with pytest.raises(CheckpointError, match=re.escape(f"bos_token {token!r} is not in the vocabulary")):
        Tokenizer.from_source(replace(source, bos_token=token))


def test_smollm2_encodes_as_the_original(smollm2_tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nHello world 123<|im_end|>\n"
    assert smollm2_tokenizer.encode(text, allow_special=True) == [1, 4093, 198, 19556, 905, 216, 33, 34, 35, 2, 198]
    assert smollm2_tokenizer.vocab_size == 49152
    assert smollm2_tokenizer.end_ids == {0, 2}
    assert not smollm2_tokenizer.add_bos


@given(text=st.text())
def test_smollm2_round_trips(smollm2_tokenizer: Tokenizer, text: str) -> None:
    absent = {byte for letter, byte in byte_alphabet().items() if smollm2_tokenizer.token_id(letter) is None}
    writable = "".join(c for c in text if not absent & set(c.encode()))  # its vocabulary lacks some bytes
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(writable)) == writable
