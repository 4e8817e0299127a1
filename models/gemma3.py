"""Gemma 3, its language model (Gemma Team 2025): local and global layers, a norm before and after every branch.

Five layers of six see a sliding window and rotate with a short base, the sixth sees everything and rotates with a long
one. Queries and keys are normed per head. Norms multiply by 1 + w. The embedding is scaled by sqrt(d), and is the head.

T tokens of the step, S logit rows, d hidden size, H query heads, KV key/value heads, D head size, F MLP size, V words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minserve.backend.base import (
    Backend,
    BatchView,
    Checkpoint,
    CheckpointError,
    Handle,
    Heads,
    LayerKV,
    Operations,
    Weight,
)
from minserve.backend.tensor import HostTensor
from minserve.models.checked_config import Dimensions, Settings, layer_windows, model_length
from minserve.models.checked_weights import Weights
from minserve.models.rope import Rope, read_rope, rope_parameters

# Published configs leave out what transformers' Gemma3TextConfig has by default.
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}


@dataclass(frozen=True, slots=True)
class Layer:
    heads: Heads
    rope: Weight
    attention_norm: Weight  # [d]
    qkv: Weight  # [(H + 2 KV) D, d]
    q_norm: Weight  # [D]
    k_norm: Weight  # [D]
    output: Weight  # [d, H D]
    attention_post_norm: Weight  # [d]
    mlp_norm: Weight  # [d]
    gate_up: Weight  # [2 F, d]
    down: Weight  # [d, F]
    mlp_post_norm: Weight  # [d]


class Gemma3:
    def __init__(self, checkpoint: Checkpoint, backend: Backend, max_model_len: int = 0) -> None:
        if "text_config" in checkpoint.config:
            checkpoint = LanguageModel(checkpoint)
        s = Settings({**DEFAULTS, **{key: v for key, v in checkpoint.config.items() if v is not None}})
        s.require("hidden_activation", "gelu_pytorch_tanh")
        s.require("final_logit_softcapping")
        s.require("use_bidirectional_attention", False)
        self.dims = dims = Dimensions.read(s)
        everywhere, nearby = read_ropes(s, dims, max_model_len)
        length = model_length(max_model_len, everywhere.context, len(everywhere.inverse))
        pattern = s.integer("sliding_window_pattern")
        windows = layer_windows(s, dims.layers, lambda i: (i + 1) % pattern != 0)
        softcap = None if s.get("attn_logit_softcapping") is None else s.number("attn_logit_softcapping")
        heads = replace(dims.attention(scale=s.number("query_pre_attn_scalar") ** -0.5), softcap=softcap)

        w = Weights(checkpoint, backend)
        ropes = {sliding: w.rope(r.inverse, r.scale, length) for sliding, r in ((False, everywhere), (True, nearby))}
        self.embed, self.head = w.embedding_and_head(dims, s.get("tie_word_embeddings"), family_ties=True)
        self.layers = [
            load_layer(w, f"model.layers.{i}", dims, replace(heads, window=window), ropes[window is not None])
            for i, window in enumerate(windows)
        ]
        self.norm = w.norm("model.norm", dims.hidden, offset=1)
        w.finish()
        self.spec = w.spec("gemma3", dims, length, [layer.heads for layer in self.layers])

    def forward(self, ops: Operations, batch: BatchView, kv: Sequence[LayerKV]) -> Handle:
        eps = self.dims.eps
        x = ops.embed(self.embed, batch, self.dims.hidden**0.5)  # [T, d]
        for layer, cache in zip(self.layers, kv, strict=True):
            qkv = ops.linear(ops.rms_norm(x, layer.attention_norm, eps), layer.qkv)  # [T, (H + 2 KV) D]
            q = ops.rope_write_kv(qkv, layer.heads, layer.rope, batch, cache, layer.q_norm, layer.k_norm, eps)
            attended = ops.linear(ops.attention(q, layer.heads, batch, cache), layer.output)  # [T, d]
            x = ops.add(x, ops.rms_norm(attended, layer.attention_post_norm, eps))
            gate_up = ops.linear(ops.rms_norm(x, layer.mlp_norm, eps), layer.gate_up)  # [T, 2 F]
            y = ops.linear(ops.glu(gate_up, "gelu"), layer.down)  # [T, d]
            x = ops.add(x, ops.rms_norm(y, layer.mlp_post_norm, eps))
        return ops.linear(ops.rms_norm(ops.take(x, batch), self.norm, eps), self.head)  # [S, V]


def load_layer(w: Weights, name: str, dims: Dimensions, heads: Heads, rope: Weight) -> Layer:
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    qkv = {"q_proj": dims.q, "k_proj": dims.kv, "v_proj": dims.kv}
    return Layer(
        heads=heads,
        rope=rope,
        attention_norm=w.norm(f"{name}.input_layernorm", dims.hidden, offset=1),
        qkv=w.linear(attention, qkv, dims.hidden),
        q_norm=w.norm(f"{attention}.q_norm", dims.head_dim, offset=1),
        k_norm=w.norm(f"{attention}.k_norm", dims.head_dim, offset=1),
        output=w.linear(attention, {"o_proj": dims.hidden}, dims.q),
        attention_post_norm=w.norm(f"{name}.post_attention_layernorm", dims.hidden, offset=1),
        mlp_norm=w.norm(f"{name}.pre_feedforward_layernorm", dims.hidden, offset=1),
        gate_up=w.gate_up(mlp, dims.mlp, dims.hidden),
        down=w.linear(mlp, {"down_proj": dims.hidden}, dims.mlp),
        mlp_post_norm=w.norm(f"{name}.post_feedforward_layernorm", dims.hidden, offset=1),
    )


def read_ropes(s: Settings, dims: Dimensions, max_len: int) -> tuple[Rope, Rope]:
    """(global, local). transformers 5 nests both in rope_parameters; before, only the global one could be scaled."""
    parameters = rope_parameters(s.values)
    everywhere = parameters.get("full_attention", parameters)
    nearby = parameters.get("sliding_attention") or {}
    if not isinstance(everywhere, Mapping) or not isinstance(nearby, Mapping):
        raise CheckpointError("config: rope_parameters must hold an object for each kind of layer")
    everywhere = {"rope_theta": s.number("rope_theta", 1000000.0), **everywhere}
    nearby = {"rope_theta": s.number("rope_local_base_freq", 10000.0), **nearby}
    return (
        read_rope(s, dims.head_dim, dims.context, max_len, parameters=everywhere),
        read_rope(s, dims.head_dim, dims.context, max_len, parameters=nearby),
    )


class LanguageModel:
    """The language half of a multimodal checkpoint, under the names of a text-only one."""

    PREFIXES = (("language_model.", ""), ("model.language_model.", "model."))  # transformers before 4.52, and since

    def __init__(self, checkpoint: Checkpoint) -> None:
        text = checkpoint.config["text_config"]
        if not isinstance(text, Mapping):
            raise CheckpointError("config: text_config must be an object")
        tie = {"tie_word_embeddings": checkpoint.config.get("tie_word_embeddings")}
        self.config: Mapping[str, Any] = {**tie, **text}
        self._checkpoint = checkpoint
        self._stored = {self._plain(name): name for name in checkpoint.names()}

    def _plain(self, name: str) -> str:
        for stored, plain in self.PREFIXES:
            if name.startswith(stored):
                return plain + name.removeprefix(stored)
        return name

    def names(self) -> Iterable[str]:
        """Without the vision tower and its projector."""
        return [name for name in self._stored if name.startswith(("model.layers.", "model.embed", "model.norm", "lm_"))]

    def tensor(self, name: str) -> HostTensor:
        return self._checkpoint.tensor(self._stored.get(name, name))
