"""The forward pass in NumPy, float32, one operation after the other: the specification of every other backend.

Owns its KV cache and the seats' penalty counts. It must not know the scheduler or which model it runs. Clear code
comes first; speed is what matrix products in BLAS give. Batch mates never meet in a sum, so a request's result does
not depend on them but for the rounding of differently shaped products (about 1e-7).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minserve.backend.base import Activation, BackendError, Forward, Heads, KVSpec, ModelSpec, Peaks, StepLimits
from minserve.backend.memory import available_memory
from minserve.backend.sampling import Seats, check_ids, sample
from minserve.backend.tensor import HostTensor
from minserve.batch import Batch, Float32, Int32, Sampled

QUERY_TILE = 128  # query rows whose scores are held at once: bounds memory at [heads, 128, context]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer or an embedding table: dense [N, K], bias [N] or None."""

    dense: Float32
    bias: Float32 | None = None


@dataclass(frozen=True, slots=True)
class Rope:
    """cos and sin by position, [max_len, rotated dimensions / 2]."""

    cos: Float32
    sin: Float32


@dataclass(frozen=True, slots=True)
class LayerCache:
    """k and v [num_blocks, block_size, kv_heads, head_dim]."""

    k: Float32
    v: Float32


class NumpyOperations:
    """The contract's operations on plain arrays. A BatchView is the Batch itself."""

    def embed(self, table: Matrix, batch: Batch, scale: float = 1.0) -> Float32:
        rows: Float32 = table.dense[batch.token_ids]
        return rows * np.float32(scale)

    def rms_norm(self, x: Float32, weight: Float32, eps: float) -> Float32:
        variance = np.mean(x * x, axis=-1, keepdims=True)
        normed: Float32 = x / np.sqrt(variance + np.float32(eps))
        return normed * weight

    def linear(self, x: Float32, weight: Matrix) -> Float32:
        y = x @ weight.dense.T
        return y if weight.bias is None else y + weight.bias

    def glu(self, x: Float32, activation: Activation) -> Float32:
        gate, up = np.split(x, 2, axis=-1)
        activated = silu(gate) if activation == "silu" else gelu(gate)
        return activated * up

    def add(self, residual: Float32, branch: Float32) -> Float32:
        return residual + branch

    def rope_write_kv(
        self,
        qkv: Float32,
        heads: Heads,
        rope: Rope,
        batch: Batch,
        cache: LayerCache,
        q_norm: Float32 | None = None,
        k_norm: Float32 | None = None,
        eps: float = 0.0,
    ) -> Float32:
        x = qkv.reshape(len(qkv), -1, heads.dim)  # [T, H + 2 KV, D]
        q, k, v = np.split(x, [heads.q, heads.q + heads.kv], axis=1)
        if q_norm is not None:
            q = self.rms_norm(q, q_norm, eps)
        if k_norm is not None:
            k = self.rms_norm(k, k_norm, eps)
        cos, sin = rope.cos[batch.positions, None], rope.sin[batch.positions, None]  # [T, 1, r / 2]
        cache.k.reshape(-1, heads.kv, heads.dim)[batch.slots] = rotate(k, cos, sin)
        cache.v.reshape(-1, heads.kv, heads.dim)[batch.slots] = v
        return rotate(q, cos, sin).reshape(len(qkv), -1)  # [T, H * D]

    def attention(self, q: Float32, heads: Heads, batch: Batch, cache: LayerCache) -> Float32:
        out = np.empty((len(q), heads.q * heads.dim), np.float32)
        for r, table in enumerate(batch.block_tables):
            start, stop = batch.query_starts[r : r + 2]
            for first in range(start, stop, QUERY_TILE):
                rows = slice(first, min(first + QUERY_TILE, stop))
                out[rows] = attend(q[rows], batch.positions[rows], table, heads, cache)
        return out

    def take(self, x: Float32, batch: Batch) -> Float32:
        return x[batch.logit_rows]


def silu(x: Float32) -> Float32:
    """x * sigmoid(x)."""
    with np.errstate(over="ignore"):  # exp of a large -x: x / inf = 0 is right
        y: Float32 = x / (1 + np.exp(-x))
    return y


def gelu(x: Float32) -> Float32:
    """Hendrycks and Gimpel's (2016) tanh approximation."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)
    y: Float32 = np.float32(0.5) * x * (1 + np.tanh(inner))
    return y


def rotate(x: Float32, cos: Float32, sin: Float32) -> Float32:
    """Rotate the pairs (i, i + r/2) of the last axis's first r dimensions; the rest stays. x [T, heads, D]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def attend(q: Float32, positions: Int32, table: Int32, heads: Heads, cache: LayerCache) -> Float32:
    """Attention of some tokens of one request: q [t, H * D] at `positions` over its blocks -> [t, H * D]."""
    t, group, block_size = len(q), heads.q // heads.kv, cache.k.shape[1]
    end = int(positions[-1]) + 1
    first_block = 0 if heads.window is None else max(0, int(positions[0]) + 1 - heads.window) // block_size
    blocks = table[first_block : -(-end // block_size)]
    key_positions = np.arange(first_block * block_size, end)
    n = len(key_positions)
    k = cache.k[blocks].reshape(-1, heads.kv, heads.dim)[:n].transpose(1, 2, 0)  # [KV, D, n]
    v = cache.v[blocks].reshape(-1, heads.kv, heads.dim)[:n].transpose(1, 0, 2)  # [KV, n, D]

    q = q.reshape(t, heads.kv, group, heads.dim).transpose(1, 2, 0, 3).reshape(heads.kv, group * t, heads.dim)
    scores = ((q @ k) * np.float32(heads.scale)).reshape(heads.kv, group, t, n)
    if heads.softcap is not None:
        scores = np.float32(heads.softcap) * np.tanh(scores / np.float32(heads.softcap))
    distance = positions[:, None] - key_positions  # [t, n]
    visible = distance >= 0 if heads.window is None else (distance >= 0) & (distance < heads.window)
    weights = np.where(visible, scores, np.float32(-np.inf))
    weights -= weights.max(axis=-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(axis=-1, keepdims=True)
    out: Float32 = weights.reshape(heads.kv, group * t, n) @ v  # [KV, group * t, D]
    return out.reshape(heads.kv, group, t, heads.dim).transpose(2, 0, 1, 3).reshape(t, -1)


class NumpyProgram:
    """A forward pass with its KV cache. Runs the model file anew, eagerly, each step."""

    def __init__(self, forward: Forward, spec: ModelSpec, limits: StepLimits, block_size: int) -> None:
        self._forward, self._spec, self._limits = forward, spec, limits
        self._slots = limits.num_blocks * block_size
        self._operations = NumpyOperations()
        self._seats = Seats(spec.vocab_size)
        shape = (limits.num_blocks, block_size)
        try:
            self._cache = [
                LayerCache(
                    np.zeros((*shape, kv.kv_heads, kv.head_dim), np.float32),
                    np.zeros((*shape, kv.kv_heads, kv.head_dim), np.float32),
                )
                for kv in spec.kv
            ]
        except MemoryError as error:
            raise BackendError(f"no memory for a KV cache of {limits.num_blocks} blocks; ask for fewer") from error

    def run(self, batch: Batch) -> Sampled:
        check_ids(batch.sampling, self._spec.vocab_size)
        logits = self.logits(batch)
        for reset in batch.resets:
            self._seats.reset(reset)
        return sample(logits, batch.sampling, self._seats)

    def logits(self, batch: Batch) -> Float32:
        self._check(batch)
        source, destination = batch.copies[:, 0], batch.copies[:, 1]
        for cache in self._cache:
            cache.k[destination] = cache.k[source]
            cache.v[destination] = cache.v[source]
        logits: Float32 = self._forward(self._operations, batch, self._cache)
        return logits

    def _check(self, batch: Batch) -> None:
        """NumPy takes negative indices and would read or write another request's rows: ValueError instead."""
        blocks = self._limits.num_blocks
        for name, ids, count in (
            ("token_ids", batch.token_ids, self._spec.vocab_size),
            ("positions", batch.positions, self._limits.max_model_len),
            ("slots", batch.slots, self._slots),
            ("block_tables", batch.block_tables, blocks),
            ("logit_rows", batch.logit_rows, batch.num_tokens),
            ("copies", batch.copies, blocks),
            *(("resets", np.concatenate([r.prompt, r.output]), self._spec.vocab_size) for r in batch.resets),
        ):
            if ids.size and not 0 <= ids.min() <= ids.max() < count:
                raise ValueError(f"{name} must lie in 0..{count - 1}, got {ids.min()}..{ids.max()}")

    def close(self) -> None:
        self._cache = []


class NumpyBackend:
    """The contract's Backend on NumPy arrays."""

    name = "numpy"

    def __init__(self, *, block_size: int = 16) -> None:
        self.block_size = block_size

    @property
    def description(self) -> str:
        return f"NumPy {np.__version__} on the CPU, float32 weights and KV cache, threads as BLAS chooses"

    def bytes_per_block(self, kv: Sequence[KVSpec]) -> int:
        return sum(2 * 4 * layer.kv_heads * layer.head_dim for layer in kv) * self.block_size

    def free_memory(self) -> int:
        return available_memory()

    def scratch_memory(self, forward: Forward, spec: ModelSpec, limits: StepLimits) -> int:
        return 0

    def peaks(self) -> Peaks:
        return measure_peaks()

    def prepare_linear(
        self, tensors: Sequence[HostTensor], bias: HostTensor | None = None, *, pairs: bool = False
    ) -> Matrix:
        parts = [tensor.float32() for tensor in tensors]
        dense = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return Matrix(np.ascontiguousarray(dense), None if bias is None else bias.float32())

    def prepare_embedding(self, tensor: HostTensor, *, tied: bool) -> Matrix:
        return Matrix(tensor.float32())

    def prepare_vector(self, tensor: HostTensor, *, offset: float = 0.0) -> Float32:
        return tensor.float32() + np.float32(offset)

    def prepare_rope(self, inverse_frequencies: npt.NDArray[np.float64], *, scale: float, max_len: int) -> Rope:
        angles = np.arange(max_len)[:, None] * inverse_frequencies  # float64
        return Rope((np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32))

    def nbytes(self, weight: Matrix | Rope | Float32) -> int:
        if isinstance(weight, Matrix):
            return weight.dense.nbytes + (0 if weight.bias is None else weight.bias.nbytes)
        if isinstance(weight, Rope):
            return weight.cos.nbytes + weight.sin.nbytes
        return weight.nbytes

    def build(self, forward: Forward, spec: ModelSpec, limits: StepLimits) -> NumpyProgram:
        return NumpyProgram(forward, spec, limits, self.block_size)


@functools.cache
def measure_peaks() -> Peaks:
    """Best of a few matrix-vector products (64 MiB read) and matrix products (1.1 GFLOP): about 50 ms, once."""
    matrix = np.ones((4096, 4096), np.float32)
    vector = np.ones(4096, np.float32)
    square = np.ones((832, 832), np.float32)
    read = _fastest(lambda: matrix @ vector, 4)
    multiply = _fastest(lambda: square @ square, 3)
    return Peaks(matrix.nbytes / read, 2 * 832**3 / multiply)


def _fastest(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
