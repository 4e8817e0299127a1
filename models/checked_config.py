"""A model's config, checked: every value for type and range before it is used.

Owns what all families read from it: Settings, Dimensions, attention windows, the longest sequence. It must not know any
family. A config is untrusted: what it claims must cost nothing until it is known to make sense.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from minserve.backend.base import CheckpointError, Heads

log = logging.getLogger("minserve.models")

MOST_ANGLES = 1 << 24  # 262,144 tokens with heads of 128: 128 MiB


class Settings:
    """config.json, read with types and ranges. Unknown keys are ignored; a bad value is an error that names its key."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def get(self, key: str) -> Any:
        """The value, None where the key is absent or null."""
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 24) -> int:
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not int or not low <= value <= high:
            raise CheckpointError(f"config: {key} must be an integer in {low}..{high}, found {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value: Any = self.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise CheckpointError(f"config: {key} must be a positive number, found {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not bool:
            raise CheckpointError(f"config: {key} must be true or false, found {value!r}")
        return value

    def require(self, key: str, *supported: Any) -> None:
        """Refuse a model that needs what we don't compute. Absent and null always pass."""
        value = self.get(key)
        if value is not None and value not in supported:
            only = f", only {' or '.join(map(repr, supported))}" if supported else ""
            raise CheckpointError(f"config: {key} = {value!r} is not supported{only}")


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The sizes that every decoder-only transformer has. Config keys are Hugging Face's."""

    vocab: int  # vocab_size, V
    hidden: int  # hidden_size, d
    mlp: int  # intermediate_size, F
    layers: int  # num_hidden_layers
    heads: int  # num_attention_heads, H
    kv_heads: int  # num_key_value_heads, KV
    head_dim: int  # D
    eps: float  # rms_norm_eps
    context: int  # max_position_embeddings

    @classmethod
    def read(cls, s: Settings, *, head_dim: int | None = None) -> Self:
        """head_dim: the family's default; None derives it from hidden_size."""
        s.require("quantization_config")
        hidden, heads = s.integer("hidden_size"), s.integer("num_attention_heads")
        kv_heads = s.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise CheckpointError(f"config: {heads} num_attention_heads don't divide into {kv_heads} groups")
        if s.get("head_dim") is None and head_dim is None and hidden % heads:
            raise CheckpointError(f"config: hidden_size {hidden} is not a multiple of {heads} num_attention_heads")
        return cls(
            vocab=s.integer("vocab_size"),
            hidden=hidden,
            mlp=s.integer("intermediate_size"),
            layers=s.integer("num_hidden_layers", high=4096),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=s.integer("head_dim", head_dim or hidden // heads),
            eps=s.number("rms_norm_eps"),
            context=s.integer("max_position_embeddings"),
        )

    @property
    def q(self) -> int:
        """Columns of the queries: H * D."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Columns of the keys, and of the values: KV * D."""
        return self.kv_heads * self.head_dim

    def attention(self, *, scale: float | None = None, window: int | None = None) -> Heads:
        """scale None: 1 / sqrt(D) (Vaswani et al. 2017)."""
        return Heads(self.heads, self.kv_heads, self.head_dim, scale or self.head_dim**-0.5, window)


def layer_windows(s: Settings, count: int, sliding: Callable[[int], bool]) -> list[int | None]:
    """Each layer's attention window, None for a layer that sees everything.

    layer_types says it where it is given, else the family's rule: sliding(i) for layer i.
    """
    kinds = {"full_attention": False, "sliding_attention": True}
    given = s.get("layer_types")
    if given is None:
        slides = [sliding(i) for i in range(count)]
    elif isinstance(given, list) and len(given) == count and all(isinstance(k, str) and k in kinds for k in given):
        slides = [kinds[kind] for kind in given]
    else:
        raise CheckpointError(f"config: layer_types must be {count} times full_attention or sliding_attention")
    return [s.integer("sliding_window") if slides[i] else None for i in range(count)]


def model_length(asked: int, context: int, pairs: int) -> int:
    """Tokens a sequence may have: what was asked for, else what the model was made for. CheckpointError if more.

    pairs: of dimensions that rotate. Without being asked no config gets larger tables of angles than MOST_ANGLES: what
    it claims costs it nothing, and us the memory before the first token. The cut is logged.
    """
    if asked > context:
        raise CheckpointError(f"max_model_len {asked} is more than the {context} tokens this model was made for")
    most = max(1, MOST_ANGLES // pairs)
    if not asked and most < context:
        log.warning("max_model_len is %d; the model says %d, which --max-model-len can ask for", most, context)
    return asked or min(context, most)
