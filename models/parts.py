"""What every family's file needs around its own mathematics: checked configs, checked weights, what a model is.

Owns no model. A config and a checkpoint are untrusted: every value is checked for type and range, every tensor for the
shape that the config promises, before it is used; no parameter stays uninitialised and no tensor stays unread unless
it is known to be harmless.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from minserve.backend.base import (
    Backend,
    Checkpoint,
    CheckpointError,
    Handle,
    Heads,
    KVSpec,
    LayerKV,
    ModelSpec,
    Operations,
    Weight,
)
from minserve.backend.tensor import HostTensor

log = logging.getLogger("minserve.models")

# Buffers that some exporters store: everything in them follows from the config.
HARMLESS = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)|.*\.self_attn\.(masked_)?bias")


class Model(Protocol):
    """A loaded model. forward is a `Forward` of the backend's contract."""

    @property
    def spec(self) -> ModelSpec: ...
    def forward(self, ops: Operations, batch: Any, kv: Sequence[LayerKV]) -> Handle: ...


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


class Weights:
    """Hands a checkpoint's tensors to the backend, and adds up what a step will have to read and compute."""

    def __init__(self, checkpoint: Checkpoint, backend: Backend) -> None:
        self._checkpoint, self._backend = checkpoint, backend
        self._names = set(checkpoint.names())
        self._read: set[str] = set()
        self._bytes = 0
        self._flops = 0
        self._head_flops = 0

    def tensor(self, name: str, *shape: int) -> HostTensor:
        """CheckpointError if the tensor is missing or has another shape."""
        tensor = self._checkpoint.tensor(name)
        if tensor.shape != shape:
            raise CheckpointError(f"tensor {name!r} has the shape {tensor.shape}, the config promises {shape}")
        self._read.add(name)
        return tensor

    def linear(self, module: str, rows: Mapping[str, int], cols: int, *, bias: bool = False) -> Weight:
        """The projections module.part of x [., cols], fused: their rows stand one after the other."""
        tensors = [self.tensor(f"{module}.{part}.weight", n, cols) for part, n in rows.items()]
        biases = [self.tensor(f"{module}.{part}.bias", n).float32() for part, n in rows.items()] if bias else []
        return self.prepare(tensors, HostTensor.from_array(f"{module}.bias", np.concatenate(biases)) if bias else None)

    def gate_up(self, module: str, rows: int, cols: int, *, bias: bool = False) -> Weight:
        """gate_proj and up_proj of a gated MLP, to be used through `glu`."""
        parts = ("gate_proj", "up_proj")
        tensors = [self.tensor(f"{module}.{part}.weight", rows, cols) for part in parts]
        biases = [self.tensor(f"{module}.{part}.bias", rows).float32() for part in parts] if bias else []
        joined = HostTensor.from_array(f"{module}.bias", np.concatenate(biases)) if bias else None
        return self.prepare(tensors, joined, pairs=True)

    def prepare(self, tensors: Sequence[HostTensor], bias: HostTensor | None = None, *, pairs: bool = False) -> Weight:
        weight = self._backend.prepare_linear(tensors, bias, pairs=pairs)
        self._bytes += self._backend.nbytes(weight)
        self._flops += sum(2 * tensor.rows * tensor.cols for tensor in tensors)
        return weight

    def norm(self, name: str, size: int, *, offset: float = 0.0) -> Weight:
        weight = self._backend.prepare_vector(self.tensor(f"{name}.weight", size), offset=offset)
        self._bytes += self._backend.nbytes(weight)
        return weight

    def rope(self, inverse_frequencies: npt.NDArray[np.float64], scale: float, max_len: int) -> Weight:
        return self._backend.prepare_rope(inverse_frequencies, scale=scale, max_len=max_len)

    def embedding_and_head(self, dims: Dimensions, tie: Any, *, family_ties: bool = False) -> tuple[Weight, Weight]:
        """The token embedding and the output head, which are one matrix where the config ties them.

        tie: the config's tie_word_embeddings. True: the head is the embedding, whatever else the file holds. False:
        the file must have a head. Absent: what the family does by default, else by presence.
        """
        stored = "lm_head.weight" in self._names
        tied = tie if tie is not None else family_ties or not stored
        if type(tied) is not bool:
            raise CheckpointError(f"config: tie_word_embeddings must be true or false, found {tie!r}")
        table = self.tensor("model.embed_tokens.weight", dims.vocab, dims.hidden)
        embed = self._backend.prepare_embedding(table, tied=tied)
        if tied:
            self._read.add("lm_head.weight")
            head = embed
        else:
            head = self._backend.prepare_linear([self.tensor("lm_head.weight", dims.vocab, dims.hidden)])
        self._bytes += self._backend.nbytes(head)
        self._head_flops = 2 * dims.vocab * dims.hidden
        return embed, head

    def finish(self) -> None:
        """CheckpointError if the file holds a tensor that the forward pass would silently leave out."""
        left = sorted(name for name in self._names - self._read if not HARMLESS.fullmatch(name))
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise CheckpointError(f"the checkpoint has tensors this family doesn't use: {', '.join(left[:3])}{more}")

    def spec(self, family: str, dims: Dimensions, max_model_len: int, heads: Sequence[Heads]) -> ModelSpec:
        """heads: one per layer."""
        return ModelSpec(
            family=family,
            vocab_size=dims.vocab,
            max_model_len=max_model_len,
            kv=tuple(KVSpec(h.kv, h.dim, h.window) for h in heads),
            weight_bytes=self._bytes,
            flops_per_token=self._flops,
            head_flops=self._head_flops,
        )


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
