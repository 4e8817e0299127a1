"""A program of the CUDA backend on the emulator, small enough for a test, and steps for it."""

from __future__ import annotations

from typing import Any

from minserve.backend.base import StepLimits
from minserve.backend.cuda_backend.program import CudaProgram
from minserve.batch import Batch
from minserve.models import load
from minserve.weights.dummy import load_dummy
from tests.helpers import Part, make_batch
from tests.simt.engines import cuda_backend

LIMITS = StepLimits(max_tokens=40, max_requests=4, max_rows=24, max_model_len=96, num_blocks=16)
IDS = [(i * 31 + 7) % 256 for i in range(90)]


def program(model: str = "dummy:llama-tiny:F16", limits: StepLimits = LIMITS, **options: Any) -> CudaProgram:
    backend = cuda_backend(compute="half", **options)
    loaded = load(load_dummy(model).checkpoint, backend, limits.max_model_len)
    return backend.build(loaded.forward, loaded.spec, limits)


def decode(*starts: int, **more: Any) -> Batch:
    """One new token for each request, after starts[i] tokens; request i holds blocks 3i .. 3i + 2."""
    parts = [Part(start, [IDS[start]], range(3 * i, 3 * i + 3), seat=i) for i, start in enumerate(starts)]
    return make_batch(parts, **more)


def prompt(count: int, request: int = 0) -> Batch:
    return make_batch([Part(0, IDS[:count], range(3 * request, 3 * request + 3))])
