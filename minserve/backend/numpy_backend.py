"""The NumPy backend: a model's forward pass run anew in each step, eagerly, one operation after the other.

Owns the KV cache and the seats' penalty counts. It must not know the scheduler or which model it runs. What the
operations mean is in numpy_operations.py.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from minserve.backend.base import BackendError, Forward, KVSpec, ModelSpec, Peaks, StepLimits
from minserve.backend.memory import available_memory
from minserve.backend.numpy_operations import LayerCache, Matrix, NumpyOperations, Rope
from minserve.backend.sampling import Seats, check_ids, sample
from minserve.backend.tensor import HostTensor
from minserve.batch import Batch, Float32, Sampled


class NumpyProgram:
    """A forward pass with its KV cache. The contract's Program."""

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
