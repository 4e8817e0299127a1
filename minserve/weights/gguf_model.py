"""What a GGUF file means, said in Hugging Face's words: config keys, tensor names, row order, vocabulary.

Owns the differences between llama.cpp's conversion (convert_hf_to_gguf.py) and the original checkpoint, per
architecture, and undoes them without loss: names, the q/k row permutation of `llama`, gemma's 1 + w norms.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from minserve.backend.base import CheckpointError
from minserve.backend.tensor import Encoding, HostTensor
from minserve.weights.gguf_config import ARCHITECTURES, translate_config
from minserve.weights.gguf_file import GgufFile
from minserve.weights.gguf_metadata import Metadata

_GLOBAL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_DIFFERENT = {  # per architecture, beside or instead of the names above; "" takes one away
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "phi3": {"mlp.gate_up_proj": "ffn_up", "mlp.up_proj": ""},
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


class GgufCheckpoint:
    """A Checkpoint over a GGUF file (the protocol of backend.base)."""

    def __init__(self, file: GgufFile) -> None:
        metadata = Metadata(file.metadata)
        self._tensors = file.tensors
        self._architecture = metadata.text("general.architecture")
        if self._architecture not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise CheckpointError(f"the architecture {self._architecture!r} is not known; known are {known}")
        self._parts = {hf: part for hf, part in {**_LAYER, **_DIFFERENT.get(self._architecture, {})}.items() if part}
        self._config = translate_config(self._architecture, metadata, file.tensors)

    @property
    def config(self) -> Mapping[str, Any]:
        return self._config

    def names(self) -> Iterable[str]:
        for name, ours in _GLOBAL.items():
            if ours in self._tensors:
                yield name
        for layer in range(self._config["num_hidden_layers"]):
            for part, ours in self._parts.items():
                for kind in ("weight", "bias"):
                    if f"blk.{layer}.{ours}.{kind}" in self._tensors:
                        yield f"model.layers.{layer}.{part}.{kind}"

    def tensor(self, name: str) -> HostTensor:
        """The tensor called `name` in the original checkpoint, with its rows and values as they were there."""
        tensor = self._tensors.get(self._name_in_file(name))
        if tensor is None:
            raise CheckpointError(f"the file has no tensor {name!r} ({self._name_in_file(name)!r} in its own names)")
        if len(tensor.shape) > 2:
            raise CheckpointError(f"tensor {name!r} has {len(tensor.shape)} dimensions; a weight has one or two")
        tensor = HostTensor(name, tensor.shape, tensor.encoding, tensor.data)
        if self._architecture == "llama" and ".self_attn." in name and (".q_proj." in name or ".k_proj." in name):
            heads = self._config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            return unpermuted(tensor, heads)
        if self._architecture == "gemma3" and name.endswith("norm.weight"):
            return HostTensor.from_array(name, tensor.float32() - np.float32(1))
        return tensor

    def _name_in_file(self, name: str) -> str:
        match = _LAYER_NAME.fullmatch(name)
        if match and match[2] in self._parts:
            return f"blk.{match[1]}.{self._parts[match[2]]}.{match[3]}"
        return _GLOBAL.get(name, name)


def unpermuted(tensor: HostTensor, heads: int) -> HostTensor:
    """Undo the conversion's reordering of q and k rows (a weight's rows, a bias's elements).

    The conversion interleaves the two halves of each head, so that the rotation pairs neighbours (2i, 2i + 1); Hugging
    Face pairs (i, i + D/2). Rows move as bytes, so this is lossless in every encoding.
    """
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise CheckpointError(f"tensor {tensor.name!r} has {rows} rows, not a multiple of 2 x {heads} heads")
    order = np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
    if len(tensor.shape) == 2:
        return tensor.take_rows(order)
    if tensor.encoding not in (Encoding.F32, Encoding.F16, Encoding.BF16):
        raise CheckpointError(f"tensor {tensor.name!r}: a {tensor.encoding} bias can't be reordered")
    elements = tensor.data.reshape(rows, -1)[order]
    return HostTensor(tensor.name, tensor.shape, tensor.encoding, elements.reshape(1, -1))
