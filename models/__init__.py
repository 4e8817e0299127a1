"""The models we know, by Hugging Face's model_type. Start with README.md, then llama.py.

Owns the registry. A family is one class: it takes a checkpoint, a backend and the longest sequence, and is a Model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from minserve.backend.base import Backend, Checkpoint, CheckpointError, Handle, LayerKV, ModelSpec, Operations
from minserve.models.gemma3 import Gemma3
from minserve.models.llama import Llama
from minserve.models.phi3 import Phi3
from minserve.models.qwen2 import Qwen2
from minserve.models.qwen3 import Qwen3


class Model(Protocol):
    """A loaded model. forward is a `Forward` of the backend's contract."""

    @property
    def spec(self) -> ModelSpec: ...
    def forward(self, ops: Operations, batch: Any, kv: Sequence[LayerKV]) -> Handle: ...


Family = Callable[[Checkpoint, Backend, int], Model]

FAMILIES: dict[str, Family] = {
    "llama": Llama,
    "mistral": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "gemma3": Gemma3,
    "gemma3_text": Gemma3,
    "phi3": Phi3,
}


def load(checkpoint: Checkpoint, backend: Backend, max_model_len: int = 0) -> Model:
    """Prepare every weight on the backend. max_model_len 0 = the model's own.

    CheckpointError for an unknown model_type (the message lists the known), a config value we don't compute, a missing,
    misshapen or unused tensor, or a length beyond the model's.
    """
    kind = checkpoint.config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise CheckpointError(f"model_type {kind!r} is not known; known are {', '.join(sorted(FAMILIES))}")
    return family(checkpoint, backend, max_model_len)
