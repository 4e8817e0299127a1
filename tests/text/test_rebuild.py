"""A GGUF file's vocabulary as a tokenizer: splits, merges, and what can't be rebuilt."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import tokenizers

from minserve.backend.base import CheckpointError
from minserve.text.rebuild import PRE_TOKENIZERS, gguf_document
from minserve.text.tokenizer import Tokenizer
from minserve.weights.vocabulary import TokenType
from tests.text.builders import byte_vocabulary, sentencepiece_golden, sentencepiece_tokenizer


@pytest.mark.parametrize("space_prefix", [True, False])
def test_scores_rebuild_what_sentencepiece_makes(space_prefix: bool) -> None:
    golden = sentencepiece_golden(space_prefix)
    tokenizer = sentencepiece_tokenizer(space_prefix)
    for text, ids, decoded in golden.cases:
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == decoded, text


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_splits_without_losing_text(pre: str) -> None:
    tokenizer = Tokenizer.from_source(byte_vocabulary(pre=pre))
    text = "It's 12345 o'clock,  WE'LL go\n\n\tto café 日本 — x_1 == 'y'   "
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "It's 123 go", ["It", "'s", " 123", " go"]),
        ("smollm", "It's 123 go", ["It", "'s", " ", "1", "2", "3", " go"]),
        ("llama-bpe", "IT'S 12345.\n", ["IT", "'S", " ", "123", "45", ".\n"]),
        ("qwen2", "a (b) 12\n\n c", ["a", " (", "b", ")", " ", "1", "2", "\n\n", " c"]),
        ("tekken", "camelCase12", ["camel", "Case", "1", "2"]),
        ("gpt-4o", "camelCase's 1234", ["camel", "Case's", " ", "123", "4"]),
        ("deepseek-v3", "日本go 1234", ["日本", "go", " ", "123", "4"]),
        ("default", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
    ],
)
def test_pre_tokenizers_split_like_the_models_own(pre: str, text: str, pieces: list[str]) -> None:
    document = gguf_document(byte_vocabulary(pre=pre))
    library = tokenizers.Tokenizer.from_str(json.dumps(document))
    split = library.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in split] == pieces


def test_words_that_are_tokens_are_taken_whole_where_the_model_does_so() -> None:
    whole = replace(byte_vocabulary(), merges=("Ġ t",))
    for pre, count in (("llama-bpe", 1), ("qwen2", 3)):
        tokenizer = Tokenizer.from_source(replace(whole, pre=pre))
        assert len(tokenizer.encode(" the")) == count, pre


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "klingon"}, "tokenizer.ggml.pre 'klingon'"),
        ({"model": "bert"}, "tokenizer.ggml.model 'bert'"),
        ({"merges": ()}, "merges is missing"),
        ({"merges": ("Ġt",)}, "not a pair"),
        ({"merges": ("Ġ nowhere",)}, "tokenizer.json"),
        ({"tokens": ["a", "a"]}, "1 duplicate"),
        ({"types": [TokenType.NORMAL]}, "token_type: 1 values"),
        ({"scores": [0.0]}, "scores: 1 values"),
        ({"model": "llama", "merges": ()}, "scores and merges are missing"),
    ],
)
def test_a_damaged_gguf_vocabulary_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_source(replace(byte_vocabulary(), **change))
