"""Phi-3, Phi-3.5 and Phi-4-mini (Abdin et al. 2024): the llama layer, stored with fused projections.

q, k, v lie in one matrix and so do gate and up. Long-context versions scale the rotation per dimension (longrope);
Phi-4-mini rotates only a part of each head.

T tokens of the step, S logit rows, d hidden size, H query heads, KV key/value heads, D head size, F MLP size, V words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minserve.backend.base import Backend, BatchView, Checkpoint, Handle, LayerKV, Operations, Weight
from minserve.models.checked_config import Dimensions, Settings, model_length
from minserve.models.checked_weights import Weights
from minserve.models.rope import read_rope, rope_parameters


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Weight  # [d]
    qkv: Weight  # [(H + 2 KV) D, d]
    output: Weight  # [d, H D]
    mlp_norm: Weight  # [d]
    gate_up: Weight  # [2 F, d]
    down: Weight  # [d, F]


class Phi3:
    def __init__(self, checkpoint: Checkpoint, backend: Backend, max_model_len: int = 0) -> None:
        s = Settings(checkpoint.config)
        s.require("hidden_act", "silu")
        self.dims = dims = Dimensions.read(s)
        window = None if s.get("sliding_window") is None else s.integer("sliding_window")
        self.heads = dims.attention(window=window)
        rope = read_rope(s, dims.head_dim, dims.context, max_model_len, parameters=longrope_parameters(s))
        length = model_length(max_model_len, rope.context, len(rope.inverse))

        w = Weights(checkpoint, backend)
        self.rope = w.rope(rope.inverse, rope.scale, length)
        self.embed, self.head = w.embedding_and_head(dims, s.get("tie_word_embeddings"))
        self.layers = [load_layer(w, f"model.layers.{i}", dims) for i in range(dims.layers)]
        self.norm = w.norm("model.norm", dims.hidden)
        w.finish()
        self.spec = w.spec("phi3", dims, length, [self.heads] * dims.layers)

    def forward(self, ops: Operations, batch: BatchView, kv: Sequence[LayerKV]) -> Handle:
        eps = self.dims.eps
        x = ops.embed(self.embed, batch)  # [T, d]
        for layer, cache in zip(self.layers, kv, strict=True):
            qkv = ops.linear(ops.rms_norm(x, layer.attention_norm, eps), layer.qkv)  # [T, (H + 2 KV) D]
            q = ops.rope_write_kv(qkv, self.heads, self.rope, batch, cache)
            attended = ops.attention(q, self.heads, batch, cache)  # [T, H D]
            x = ops.add(x, ops.linear(attended, layer.output))  # [T, d]
            gate_up = ops.linear(ops.rms_norm(x, layer.mlp_norm, eps), layer.gate_up)  # [T, 2 F]
            x = ops.add(x, ops.linear(ops.glu(gate_up, "silu"), layer.down))  # [T, d]
        return ops.linear(ops.rms_norm(ops.take(x, batch), self.norm, eps), self.head)  # [S, V]


def longrope_parameters(s: Settings) -> dict[str, object]:
    """The first releases said "su" or "yarn" where they meant longrope."""
    parameters = dict(rope_parameters(s.values))
    kind = parameters.get("rope_type") or parameters.get("type")
    return {**parameters, "rope_type": "longrope"} if kind in ("su", "yarn") else parameters


def load_layer(w: Weights, name: str, dims: Dimensions) -> Layer:
    qkv = w.tensor(f"{name}.self_attn.qkv_proj.weight", dims.q + 2 * dims.kv, dims.hidden)
    gate_up = w.tensor(f"{name}.mlp.gate_up_proj.weight", 2 * dims.mlp, dims.hidden)
    gate, up = gate_up.slice_rows(0, dims.mlp), gate_up.slice_rows(dims.mlp, 2 * dims.mlp)
    return Layer(
        attention_norm=w.norm(f"{name}.input_layernorm", dims.hidden),
        qkv=w.prepare([qkv]),
        output=w.linear(f"{name}.self_attn", {"o_proj": dims.hidden}, dims.q),
        mlp_norm=w.norm(f"{name}.post_attention_layernorm", dims.hidden),
        gate_up=w.prepare([gate, up], pairs=True),
        down=w.linear(f"{name}.mlp", {"down_proj": dims.hidden}, dims.mlp),
    )
