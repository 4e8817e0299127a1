"""The llama family: Llama 2 and 3 (Touvron et al. 2023, Grattafiori et al. 2024), SmolLM2, Mistral (Jiang et al. 2023).

A stack of layers, each adding attention and then a gated MLP to the residual stream, with RMSNorm before either, rotary
positions, and fewer key/value heads than query heads. Read `forward` first: it is the whole model.

T tokens of the step, S logit rows, d hidden size, H query heads, KV key/value heads, D head size, F MLP size, V words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minserve.backend.base import Backend, BatchView, Checkpoint, Handle, LayerKV, Operations, Weight
from minserve.models.checked_config import Dimensions, Settings, model_length
from minserve.models.checked_weights import Weights
from minserve.models.rope import read_rope


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Weight  # [d]
    qkv: Weight  # [(H + 2 KV) D, d]
    output: Weight  # [d, H D]
    mlp_norm: Weight  # [d]
    gate_up: Weight  # [2 F, d]
    down: Weight  # [d, F]


class Llama:
    def __init__(self, checkpoint: Checkpoint, backend: Backend, max_model_len: int = 0) -> None:
        s = Settings(checkpoint.config)
        s.require("hidden_act", "silu")
        self.dims = dims = Dimensions.read(s)
        window = None if s.get("sliding_window") is None else s.integer("sliding_window")
        self.heads = dims.attention(window=window)
        rope = read_rope(s, dims.head_dim, dims.context, max_model_len)
        length = model_length(max_model_len, rope.context, len(rope.inverse))

        w = Weights(checkpoint, backend)
        self.rope = w.rope(rope.inverse, rope.scale, length)
        self.embed, self.head = w.embedding_and_head(dims, s.get("tie_word_embeddings"))
        biases = s.flag("attention_bias"), s.flag("mlp_bias")
        self.layers = [load_layer(w, f"model.layers.{i}", dims, *biases) for i in range(dims.layers)]
        self.norm = w.norm("model.norm", dims.hidden)
        w.finish()
        self.spec = w.spec("llama", dims, length, [self.heads] * dims.layers)

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


def load_layer(w: Weights, name: str, dims: Dimensions, attention_bias: bool, mlp_bias: bool) -> Layer:
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    qkv = {"q_proj": dims.q, "k_proj": dims.kv, "v_proj": dims.kv}
    return Layer(
        attention_norm=w.norm(f"{name}.input_layernorm", dims.hidden),
        qkv=w.linear(attention, qkv, dims.hidden, bias=attention_bias),
        output=w.linear(attention, {"o_proj": dims.hidden}, dims.q, bias=attention_bias),
        mlp_norm=w.norm(f"{name}.post_attention_layernorm", dims.hidden),
        gate_up=w.gate_up(mlp, dims.mlp, dims.hidden, bias=mlp_bias),
        down=w.linear(mlp, {"down_proj": dims.hidden}, dims.mlp, bias=mlp_bias),
    )
