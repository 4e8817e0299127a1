"""The contract between a model file and the machine it runs on: about a dozen operations on handles.

Owns no state. It must not know the scheduler, HTTP or files. The NumPy backend is the specification: every other
backend is compared with it, operation by operation.

A *handle* stands for a 2-D float array [rows, cols] inside a forward pass. In the eager NumPy backend it is the array;
in a recorder it is a buffer with a symbolic row count, T (tokens of the step) or S (logit rows). A model uses nothing
but these operations, must use the returned handle (the old one is dead after rope_write_kv and may be after add), and
has no data-dependent shapes or Python branches on values.

Scalars (eps, scale, softcap, theta) are Python floats: kernels take them as float64 and round once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from minserve.backend.tensor import HostTensor
from minserve.batch import Batch, Sampled

Handle = Any  # a backend's own type: an array, or a recorder's value
Weight = Any  # what prepare_* returned
LayerKV = Any  # one layer's KV cache
BatchView = Any  # the step's integer inputs as the backend holds them
Activation = Literal["silu", "gelu"]  # gelu is the tanh form


class CheckpointError(ValueError):
    """A model's files are damaged, lie about themselves, or hold something that can't be read. Says which and where."""


class BackendError(Exception):
    """The machine can't run this (too little memory, no driver, an encoding it lacks). The message says what helps."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention geometry of a layer. scale multiplies q.k; window: a token sees itself and the window - 1 before it;
    softcap: scores become softcap * tanh(score / softcap)."""

    q: int
    kv: int
    dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None

    @property
    def cols(self) -> int:
        """Columns of a fused q | k | v projection."""
        return (self.q + 2 * self.kv) * self.dim


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one layer keeps per token: kv heads x head dim, twice (K and V)."""

    kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the engine must know of a loaded model, whatever its family.

    weight_bytes: bytes of weights a step reads at least once, as stored by the backend. flops_per_token: of the
    linear layers, without the head; head_flops: per logit row.
    """

    family: str
    vocab_size: int
    max_model_len: int
    kv: tuple[KVSpec, ...]
    weight_bytes: int
    flops_per_token: int
    head_flops: int


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step a program must be able to run, and the size of its KV cache."""

    max_tokens: int  # T
    max_requests: int  # R, and the number of seats
    max_rows: int  # S
    max_model_len: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured limits of this machine: what utilization is divided by. bytes/s and FLOP/s."""

    bandwidth: float
    flops: float


class Checkpoint(Protocol):
    """Where a model's weights come from. Names and config keys are Hugging Face's, whatever the file format.

    config: config.json's content (GGUF metadata is translated). tensor() raises CheckpointError naming what is missing.
    """

    @property
    def config(self) -> Mapping[str, Any]: ...
    def names(self) -> Iterable[str]: ...
    def tensor(self, name: str) -> HostTensor: ...


class Operations(Protocol):
    """What a forward pass may call. Row counts: T until take, S after it."""

    def embed(self, table: Weight, batch: BatchView, scale: float = 1.0) -> Handle:
        """table [V, d], token ids [T] -> [T, d], multiplied by scale."""

    def rms_norm(self, x: Handle, weight: Weight, eps: float) -> Handle:
        """x / sqrt(mean(x^2) + eps) * weight, per row (Zhang, Sennrich 2019). Gemma's 1 + w is folded when loading."""

    def linear(self, x: Handle, weight: Weight) -> Handle:
        """x [rows, K], weight [N, K] with optional bias [N] -> x @ weight.T + bias, [rows, N]."""

    def glu(self, x: Handle, activation: Activation) -> Handle:
        """x [rows, 2F] = gate | up -> act(gate) * up, [rows, F]. Made by a pairs=True weight."""

    def add(self, residual: Handle, branch: Handle) -> Handle:
        """Elementwise sum; may overwrite residual."""

    def rope_write_kv(
        self,
        qkv: Handle,
        heads: Heads,
        rope: Weight,
        batch: BatchView,
        cache: LayerKV,
        q_norm: Weight | None = None,
        k_norm: Weight | None = None,
        eps: float = 0.0,
    ) -> Handle:
        """qkv [T, (H + 2 KV) D] -> handle whose first H * D columns are rotated q; k and v go to the slots.

        q_norm, k_norm: RMSNorm weights [D] applied per head before the rotation (qwen3, gemma3). The rotation pairs
        dimension i with i + r/2 for the first r = 2 * len(inverse frequencies) dimensions (Su et al. 2021, NeoX order).
        """

    def attention(self, q: Handle, heads: Heads, batch: BatchView, cache: LayerKV) -> Handle:
        """Causal softmax attention of each token over its request's rows in the paged cache -> [T, H * D]."""

    def take(self, x: Handle, batch: BatchView) -> Handle:
        """The rows whose logits are wanted: [T, d] -> [S, d]."""


class Forward(Protocol):
    """A model's forward pass with the model bound: returns logits [S, vocab]."""

    def __call__(self, ops: Operations, batch: BatchView, kv: Sequence[LayerKV]) -> Handle: ...


class Program(Protocol):
    """A forward pass made ready to run, with its KV cache. Used by one worker thread only, after construction."""

    def run(self, batch: Batch) -> Sampled:
        """Copy blocks, reset seats, compute, sample. Blocks until the result is on the host."""

    def logits(self, batch: Batch) -> npt.NDArray[np.float32]:
        """The same step without sampling: [S, vocab]. For tests, accuracy checks and scoring."""

    def close(self) -> None:
        """Free device memory and threads. Idempotent."""


class Backend(Protocol):
    """A machine. Prepares weights, sizes the cache, builds programs."""

    @property
    def name(self) -> str:
        """numpy, numba or cuda."""

    @property
    def description(self) -> str:
        """One line for people: device, threads, vector width, weight and KV dtypes."""

    @property
    def block_size(self) -> int: ...
    def bytes_per_block(self, kv: Sequence[KVSpec]) -> int: ...
    def free_memory(self) -> int:
        """Bytes the KV cache may be taken from: device memory, or host memory within the cgroup's limit."""

    def scratch_memory(self, forward: Forward, spec: ModelSpec, limits: StepLimits) -> int:
        """Of free_memory, bytes that a program of these limits takes beside its KV cache, before anything is allocated.

        limits.num_blocks doesn't count. 0 where it is little beside what memory_fraction leaves.
        """

    def peaks(self) -> Peaks: ...
    def prepare_linear(
        self, tensors: Sequence[HostTensor], bias: HostTensor | None = None, *, pairs: bool = False
    ) -> Weight:
        """Rows of all tensors one after the other -> [sum N, K]. pairs: exactly gate and up, used only through glu."""

    def prepare_embedding(self, tensor: HostTensor, *, tied: bool) -> Weight:
        """[V, d] usable by embed, and, if tied, by linear as the head too (one copy)."""

    def prepare_vector(self, tensor: HostTensor, *, offset: float = 0.0) -> Weight:
        """A norm's weight [d] plus offset."""

    def prepare_rope(self, inverse_frequencies: npt.NDArray[np.float64], *, scale: float, max_len: int) -> Weight:
        """cos and sin tables of positions 0..max_len - 1, both multiplied by scale (yarn's attention factor)."""

    def nbytes(self, weight: Weight) -> int:
        """Bytes this prepared weight takes on the device."""

    def build(self, forward: Forward, spec: ModelSpec, limits: StepLimits) -> Program:
        """Allocate the KV cache and make the forward pass ready (record, compile, capture). May take seconds."""
