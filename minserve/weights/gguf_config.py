"""GGUF metadata as the config.json that Hugging Face would have for the same model.

Owns the translation per architecture. Sources: llama.cpp's convert_hf_to_gguf.py (what was dropped) and
llama-model.cpp (the constants it assumes where the file says nothing).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from minserve.backend.base import CheckpointError
from minserve.backend.tensor import HostTensor
from minserve.weights.gguf_metadata import Metadata

ARCHITECTURES = {  # GGUF's name -> model_type. Mistral's files say llama.
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
_MAX_LAYERS = 4096
_MAX_HEAD_DIM = 1024
_GEMMA3_PATTERN = 6  # every sixth layer attends to everything
_GEMMA3_27B_LAYERS = 62


def translate_config(architecture: str, metadata: Metadata, tensors: Mapping[str, HostTensor]) -> dict[str, Any]:
    """config.json's content. CheckpointError naming the key that is missing, mistyped, or contradicted by a tensor."""
    m = Metadata(metadata.values, prefix=architecture)
    if m.integer(".expert_count", 0, low=0) > 0:
        raise CheckpointError("mixtures of experts are not supported")
    vocab, hidden = _embedding_shape(m, tensors)
    heads = m.integer(".attention.head_count", high=hidden)
    head_dim = m.integer(".attention.key_length", hidden // heads, high=max(hidden, _MAX_HEAD_DIM))
    config: dict[str, Any] = {
        "model_type": ARCHITECTURES[architecture],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": m.integer(".feed_forward_length"),
        "num_hidden_layers": m.integer(".block_count", high=_MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": m.integer(".attention.head_count_kv", heads, high=heads),
        "head_dim": head_dim,
        "rms_norm_eps": m.number(".attention.layer_norm_rms_epsilon"),
        "rope_theta": m.number(".rope.freq_base", 10000.0, low=1.0),
        "max_position_embeddings": m.integer(".context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
    }
    if m.integer(".attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{architecture}.attention.value_length differs from the key length")
    rotated = m.integer(".rope.dimension_count", head_dim, high=head_dim)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    scaling = _rope_scaling(m, tensors, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    if architecture == "gemma3":
        config |= _gemma3(m, config)
    elif ".attention.sliding_window" in m:
        config["sliding_window"] = m.integer(".attention.sliding_window", low=0) or None
    return config


def _embedding_shape(m: Metadata, tensors: Mapping[str, HostTensor]) -> tuple[int, int]:
    """(vocabulary, hidden size): the file says only the second in its metadata too."""
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError("the file has no token_embd.weight with two dimensions")
    hidden = m.integer(".embedding_length")
    if embedding.cols != hidden:
        raise CheckpointError(f"{m.prefix}.embedding_length is {hidden}, but token_embd.weight has {embedding.cols}")
    return embedding.rows, hidden


def _gemma3(m: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    pattern = m.integer(".attention.sliding_window_pattern", _GEMMA3_PATTERN)
    softcap = m.number(".final_logit_softcapping", 0.0)
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if layers == _GEMMA3_27B_LAYERS else config["head_dim"],
        "rope_theta": m.number(".rope.freq_base", 1000000.0, low=1.0),
        "rope_local_base_freq": m.number(".rope.freq_base_swa", 10000.0, low=1.0),
        "sliding_window": m.integer(".attention.sliding_window"),
        "sliding_window_pattern": pattern,
        "layer_types": ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": softcap or None,
    }


def _rope_scaling(m: Metadata, tensors: Mapping[str, HostTensor], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Hugging Face's rope_scaling. Factors per frequency (Llama 3's, already computed by the conversion) are what
    `longrope` does with equal short and long factors and no attention factor."""
    kind = m.text(".rope.scaling.type", "none")
    original = m.integer(".rope.scaling.original_context_length", config["max_position_embeddings"])
    half = m.integer(".rope.dimension_count", config["head_dim"]) // 2
    if "rope_freqs.weight" in tensors:
        factors = _factors(tensors["rope_freqs.weight"], half)
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": original,
        }
    if "rope_factors_long.weight" in tensors and "rope_factors_short.weight" in tensors:
        longrope: dict[str, Any] = {
            "rope_type": "longrope",
            "short_factor": _factors(tensors["rope_factors_short.weight"], half),
            "long_factor": _factors(tensors["rope_factors_long.weight"], half),
            "original_max_position_embeddings": original,
        }
        if ".rope.scaling.attn_factor" in m:
            longrope["attention_factor"] = m.number(".rope.scaling.attn_factor")
        return longrope
    factor = m.number(".rope.scaling.factor", m.number(".rope.scale_linear", 1.0), low=1.0)
    if kind == "yarn":
        extra = m.number(".rope.scaling.attn_factor", 1.0)
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": extra * (0.1 * math.log(factor) + 1.0),
            "beta_fast": m.number(".rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": m.number(".rope.scaling.yarn_beta_slow", 1.0),
        }
    if kind not in ("none", "linear"):
        raise CheckpointError(f"rope.scaling.type {kind!r} is not supported (none, linear, yarn are)")
    return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None


def _factors(tensor: HostTensor, half: int) -> list[float]:
    if tensor.shape != (half,):
        raise CheckpointError(f"tensor {tensor.name!r} has the shape {tensor.shape}, not ({half},)")
    factors: list[float] = tensor.float32().tolist()
    if not all(math.isfinite(f) and f > 0 for f in factors):
        raise CheckpointError(f"tensor {tensor.name!r} has factors that are not positive numbers")
    return factors
