"""Qwen2 and Qwen2.5 (Yang et al. 2024): the llama layer with a bias on queries, keys and values.

Some checkpoints let the upper layers see a sliding window only; the config says which.

T tokens of the step, S logit rows, d hidden size, H query heads, KV key/value heads, D head size, F MLP size, V words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minserve.backend.base import Backend, BatchView, Checkpoint, Handle, Heads, LayerKV, Operations, Weight
from minserve.models.checked_config import Dimensions, Settings, layer_windows, model_length
from minserve.models.checked_weights import Weights
from minserve.models.rope import read_rope


@dataclass(frozen=True, slots=True)
class Layer:
    heads: Heads
    attention_norm: Weight  # [d]
    qkv: Weight  # [(H + 2 KV) D, d] and bias
    output: Weight  # [d, H D]
    mlp_norm: Weight  # [d]
    gate_up: Weight  # [2 F, d]
    down: Weight  # [d, F]


class Qwen2:
    def __init__(self, checkpoint: Checkpoint, backend: Backend, max_model_len: int = 0) -> None:
        s = Settings(checkpoint.config)
        s.require("hidden_act", "silu")
        self.dims = dims = Dimensions.read(s)
        rope = read_rope(s, dims.head_dim, dims.context, max_model_len)
        length = model_length(max_model_len, rope.context, len(rope.inverse))
        first = s.integer("max_window_layers", 28, low=0) if s.flag("use_sliding_window") else dims.layers
        windows = layer_windows(s, dims.layers, lambda i: i >= first)

        w = Weights(checkpoint, backend)
        self.rope = w.rope(rope.inverse, rope.scale, length)
        self.embed, self.head = w.embedding_and_head(dims, s.get("tie_word_embeddings"))
        self.layers = [load_layer(w, f"model.layers.{i}", dims, window) for i, window in enumerate(windows)]
        self.norm = w.norm("model.norm", dims.hidden)
        w.finish()
        self.spec = w.spec("qwen2", dims, length, [layer.heads for layer in self.layers])

    def forward(self, ops: Operations, batch: BatchView, kv: Sequence[LayerKV]) -> Handle:
        eps = self.dims.eps
        x = ops.embed(self.embed, batch)  # [T, d]
        for layer, cache in zip(self.layers, kv, strict=True):
            qkv = ops.linear(ops.rms_norm(x, layer.attention_norm, eps), layer.qkv)  # [T, (H + 2 KV) D]
            q = ops.rope_write_kv(qkv, layer.heads, self.rope, batch, cache)
            attended = ops.attention(q, layer.heads, batch, cache)  # [T, H D]
            x = ops.add(x, ops.linear(attended, layer.output))  # [T, d]
            gate_up = ops.linear(ops.rms_norm(x, layer.mlp_norm, eps), layer.gate_up)  # [T, 2 F]
            x = ops.add(x, ops.linear(ops.glu(gate_up, "silu"), layer.down))  # [T, d]
        return ops.linear(ops.rms_norm(ops.take(x, batch), self.norm, eps), self.head)  # [S, V]


def load_layer(w: Weights, name: str, dims: Dimensions, window: int | None) -> Layer:
    qkv = {"q_proj": dims.q, "k_proj": dims.kv, "v_proj": dims.kv}
    return Layer(
        heads=dims.attention(window=window),
        attention_norm=w.norm(f"{name}.input_layernorm", dims.hidden),
        qkv=w.linear(f"{name}.self_attn", qkv, dims.hidden, bias=True),
        output=w.linear(f"{name}.self_attn", {"o_proj": dims.hidden}, dims.q),
        mlp_norm=w.norm(f"{name}.post_attention_layernorm", dims.hidden),
        gate_up=w.gate_up(f"{name}.mlp", dims.mlp, dims.hidden),
        down=w.linear(f"{name}.mlp", {"down_proj": dims.hidden}, dims.mlp),
    )
