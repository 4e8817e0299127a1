"""Typed access to GGUF metadata: a key with another type, or a number out of its range, is an error that names it.

Owns the checks, and the vocabulary's arrays. It must not know tensors or architectures.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from minserve.backend.base import CheckpointError
from minserve.weights.gguf_file import Value
from minserve.weights.vocabulary import GgufVocabulary, TokenType


class Metadata:
    """prefix: the architecture, put before keys that start with a dot (".block_count" is "llama.block_count")."""

    def __init__(self, values: Mapping[str, Value], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self._name(key) in self.values

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 31) -> int:
        """A whole number in [low, high]. An array of equal numbers (one per layer) counts as that number."""
        value = self._value(key, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
            if (value != value[0]).any():
                raise CheckpointError(f"{self._name(key)} differs between layers, which is not supported")
            value = int(value[0])
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise CheckpointError(f"{self._name(key)} must be a whole number from {low} to {high}, not {_short(value)}")
        return value

    def number(self, key: str, default: float | None = None, *, low: float = 0.0, high: float = 1e30) -> float:
        """A number in [low, high]; NaN is in no range."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise CheckpointError(f"{self._name(key)} must be a number from {low} to {high}, not {_short(value)}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self._name(key)} must be a string, not {_short(value)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self._name(key)} must be true or false, not {_short(value)}")
        return value

    def texts(self, key: str) -> list[str]:
        """An array of strings; empty if the key is missing."""
        value = self.values.get(self._name(key), [])
        if not isinstance(value, list):
            raise CheckpointError(f"{self._name(key)} must be an array of strings, not {_short(value)}")
        return value

    def numbers(self, key: str, kinds: str, length: int) -> list[float]:
        """An array of `length` numbers whose NumPy kind is in `kinds` ("iu", "f"); empty if the key is missing."""
        name = self._name(key)
        if name not in self.values:
            return []
        value = self.values[name]
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
            raise CheckpointError(f"{name} must be an array of numbers of kind {kinds!r}, not {_short(value)}")
        if len(value) != length:
            raise CheckpointError(f"{name} has {len(value)} entries, not {length}")
        return value.tolist()  # type: ignore[no-any-return]

    def _name(self, key: str) -> str:
        return self.prefix + key if key.startswith(".") else key

    def _value(self, key: str, default: Value | None) -> Value:
        value = self.values.get(self._name(key), default)
        if value is None:
            raise CheckpointError(f"the metadata has no {self._name(key)}")
        return value


def _short(value: object) -> str:
    if isinstance(value, np.ndarray | list):
        return f"an array of {len(value)}"
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."


def vocabulary(metadata: Metadata) -> GgufVocabulary:
    """The tokenizer's arrays, with their lengths and types checked against each other."""
    tokens = metadata.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError("tokenizer.ggml.tokens is missing or empty: the file has no vocabulary")
    scores = metadata.numbers("tokenizer.ggml.scores", "f", len(tokens))
    types = [int(kind) for kind in metadata.numbers("tokenizer.ggml.token_type", "iu", len(tokens))]
    if types and not 0 <= min(types) <= max(types) <= max(TokenType):
        raise CheckpointError("tokenizer.ggml.token_type has entries that are no token type")

    def token(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in metadata:
            return None
        value = metadata.integer(key, low=0, high=(1 << 32) - 1)
        return value if value < len(tokens) else None  # some converters write 2^32 - 1 for "none"

    ends = [token(name) for name in ("eos", "eot", "eom")]
    model = metadata.text("tokenizer.ggml.model")
    sentencepiece = model == "llama"
    return GgufVocabulary(
        model=model,
        pre=metadata.text("tokenizer.ggml.pre", "default"),
        tokens=tokens,
        scores=scores,
        types=types,
        merges=metadata.texts("tokenizer.ggml.merges"),
        bos_id=token("bos"),
        eos_id=token("eos"),
        unk_id=token("unknown"),
        end_ids=frozenset(i for i in ends if i is not None),
        add_bos=metadata.flag("tokenizer.ggml.add_bos_token", sentencepiece),
        add_space_prefix=metadata.flag("tokenizer.ggml.add_space_prefix", sentencepiece),
    )
