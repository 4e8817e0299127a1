"""Small forward passes and the same one on both backends: what the operation tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minserve.backend.base import Backend, Forward, Heads, KVSpec, ModelSpec, StepLimits
from minserve.backend.numba_backend import NumbaBackend
from minserve.backend.numpy_backend import NumpyBackend
from minserve.backend.tensor import Encoding, HostTensor
from minserve.batch import Batch
from minserve.weights.dummy import random_tensor

LIMITS = StepLimits(max_tokens=192, max_requests=8, max_rows=192, max_model_len=640, num_blocks=96)
Make = Callable[[Backend], Forward]  # prepares the weights on a backend


def tensor(rng: np.random.Generator, rows: int, cols: int, encoding: str = "BF16", name: str = "w") -> HostTensor:
    """Random weights that keep activations near 1. BF16: what the Numba backend holds without loss."""
    return random_tensor(name, (rows, cols), Encoding(encoding), rng, cols**-0.5)


def vector(rng: np.random.Generator, size: int, mean: float = 0.0) -> HostTensor:
    return HostTensor.from_array("v", (mean + 0.3 * rng.standard_normal(size)).astype(np.float32))


def run(
    backend: Backend, make: Make, vocab: int, batches: Sequence[Batch], heads: Sequence[Heads] = ()
) -> list[np.ndarray]:
    """The logits of each step of a program built from `make`."""
    kv = tuple(KVSpec(h.kv, h.dim, h.window) for h in heads)
    spec = ModelSpec("test", vocab, LIMITS.max_model_len, kv, 0, 0, 0)
    program = backend.build(make(backend), spec, LIMITS)
    try:
        return [program.logits(batch) for batch in batches]
    finally:
        program.close()


def error(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """The largest relative error of a row of logits; rows that happen to be small are measured against 1 a column."""
    return max(
        float(np.max(np.linalg.norm(a - b, axis=1) / np.maximum(np.linalg.norm(b, axis=1), a.shape[1] ** 0.5)))
        for a, b in zip(ours, theirs, strict=True)
    )


def compare(make: Make, vocab: int, batches: Sequence[Batch], heads: Sequence[Heads] = (), **options: Any) -> float:
    """The relative error of the Numba backend against the NumPy backend."""
    backend = NumbaBackend(**{"threads": 2, **options})
    return error(run(backend, make, vocab, batches, heads), run(NumpyBackend(), make, vocab, batches, heads))
