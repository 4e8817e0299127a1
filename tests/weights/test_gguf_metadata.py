"""The vocabulary in GGUF metadata, and metadata that lies about it."""

from pathlib import Path
from typing import Any

import pytest

from minserve.backend.base import CheckpointError
from minserve.weights.gguf_file import read_gguf
from minserve.weights.gguf_metadata import Metadata, vocabulary
from tests.weights.build import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT8, UINT32, Key, gguf_model
from tests.weights.tiny_gguf import EMBEDDING, keys


def words(folder: Path, *more: Key, leave: str = "") -> Any:
    path = folder / "model.gguf"
    path.write_bytes(gguf_model(keys("llama", *more, leave=leave), EMBEDDING))
    return vocabulary(Metadata(read_gguf(path).metadata))


def test_the_vocabulary_is_read(tmp_path: Path) -> None:
    v = words(
        tmp_path, ("tokenizer.ggml.eot_token_id", UINT32, 3), ("tokenizer.ggml.bos_token_id", UINT32, (1 << 32) - 1)
    )
    assert (v.model, v.pre, v.tokens, v.merges) == ("gpt2", "smollm", ["<|end|>", "a", "b", "ab"], ["a b"])
    assert (v.bos_id, v.eos_id, v.end_ids) == (None, 0, {0, 3})
    assert (v.add_bos, v.add_space_prefix, v.scores) == (False, False, [])


def test_sentencepiece_vocabularies_start_with_bos_and_a_space_unless_they_say_otherwise(tmp_path: Path) -> None:
    more = (
        ("tokenizer.ggml.model", STRING, "llama"),
        ("tokenizer.ggml.scores", ARRAY, (FLOAT32, [0.0, -1.0, -2.0, -3.0])),
    )
    v = words(tmp_path, *more)
    assert (v.add_bos, v.add_space_prefix, v.scores) == (True, True, [0.0, -1.0, -2.0, -3.0])
    assert words(tmp_path, *more, ("tokenizer.ggml.add_space_prefix", BOOL, False)).add_space_prefix is False


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("tokenizer.ggml.tokens", ARRAY, (UINT8, [1, 2, 3])), "tokens must be an array of strings"),
        (("tokenizer.ggml.tokens", STRING, "abc"), "tokens must be an array of strings"),
        (("tokenizer.ggml.tokens", ARRAY, (STRING, [])), "no vocabulary"),
        (("tokenizer.ggml.token_type", ARRAY, (INT32, [1])), "has 1 entries, not 4"),
        (("tokenizer.ggml.token_type", ARRAY, (INT32, [1, 1, 1, 99])), "no token type"),
        (("tokenizer.ggml.token_type", ARRAY, (FLOAT32, [1.0] * 4)), "array of numbers"),
        (("tokenizer.ggml.scores", ARRAY, (STRING, ["a"] * 4)), "array of numbers"),
        (("tokenizer.ggml.merges", UINT32, 7), "merges must be an array of strings"),
        (("tokenizer.ggml.eos_token_id", FLOAT32, 1.0), "eos_token_id must be a whole number"),
        (("tokenizer.ggml.add_bos_token", UINT32, 1), "must be true or false"),
    ],
)
# bug: 79
def test_a_vocabulary_that_lies_is_refused(tmp_path: Path, more: Key, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        words(tmp_path, more)
