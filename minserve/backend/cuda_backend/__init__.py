"""The CUDA backend: raw kernels (kernels_cuda/*.cu) through CuPy, cuBLAS through ctypes, decode steps as CUDA graphs.

Reading order: ops.py and attention.py (what each operation launches), lowering.py (what is fused), program.py (how a
step runs), then sampler.py, step.py and weights.py. Needs NumPy and CuPy 13 or later, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from minserve.backend.cuda_backend.device import availability

if TYPE_CHECKING:  # this package also runs where only NumPy and CuPy are installed
    from minserve.backend.base import Backend
    from minserve.config import EngineConfig, ModelConfig

__all__ = ["availability", "create"]


def create(
    engine: EngineConfig,
    model: ModelConfig,
    *,
    weights_id: bytes = b"",
    progress: Callable[[str], None] = lambda _: None,
) -> Backend:
    """The backend on the first GPU that CUDA_VISIBLE_DEVICES shows. BackendError with one sentence that says what is
    missing."""
    from minserve.backend.base import BackendError
    from minserve.backend.cuda_backend.backend import CudaBackend
    from minserve.backend.cuda_backend.blas import load_library
    from minserve.backend.cuda_backend.device import check_device, cuda_major, enough_memory, import_cupy, unusable

    if model.quantize != "none":
        raise BackendError(
            f"quantize = {model.quantize!r} needs the numba backend; a GPU keeps the file's own encoding"
        )
    cp = import_cupy()
    check_device(cp)
    library = load_library(cuda_major(cp))
    try:
        with enough_memory(cp, "Stop what else uses it."):
            backend = CudaBackend(cp, library, block_size=engine.block_size, progress=progress)
            backend.peaks()  # measured while memory is free
    except RuntimeError as error:  # CUDA's own errors, when the first work fails
        raise BackendError(unusable(error)) from error
    return backend
