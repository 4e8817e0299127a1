"""A model's weights, checked: every tensor has the shape that the config promises, and none stays unread.

Owns the way from a checkpoint to the backend, and sums of bytes and operations. It must not know any family. A
checkpoint is untrusted: no parameter stays uninitialised, and a tensor that nobody uses is an error unless it is known
to be harmless.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from minserve.backend.base import Backend, Checkpoint, CheckpointError, Heads, KVSpec, ModelSpec, Weight
from minserve.backend.tensor import HostTensor
from minserve.models.checked_config import Dimensions

# Buffers that some exporters store: everything in them follows from the config.
HARMLESS = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)|.*\.self_attn\.(masked_)?bias")


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

    def linear(
        self, module: str, rows: Mapping[str, int], cols: int, *, bias: bool = False, pairs: bool = False
    ) -> Weight:
        """The projections module.part of x [., cols], fused: their rows stand one after the other. pairs: a gate and an
        up, to be used through `glu`."""
        tensors = [self.tensor(f"{module}.{part}.weight", n, cols) for part, n in rows.items()]
        biases = [self.tensor(f"{module}.{part}.bias", n).float32() for part, n in rows.items()] if bias else []
        joined = HostTensor.from_array(f"{module}.bias", np.concatenate(biases)) if bias else None
        return self.prepare(tensors, joined, pairs=pairs)

    def gate_up(self, module: str, rows: int, cols: int, *, bias: bool = False) -> Weight:
        """gate_proj and up_proj of a gated MLP."""
        return self.linear(module, {"gate_proj": rows, "up_proj": rows}, cols, bias=bias, pairs=True)

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
