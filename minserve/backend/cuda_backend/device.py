"""Is there a GPU that we can use? If not, one sentence that says what to install.

Owns the diagnosis, also of memory that runs out later. It must not know models; it is the only place that asks CuPy
about drivers and versions.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minserve.backend.base import BackendError
from minserve.backend.cuda_backend.blas import load_library

MIN_CUPY = 13  # the first whose copies to the host need not block
MIN_CAPABILITY = 80  # mma.sync with bfloat16 and cp.async: Ampere
MIN_FREE_BYTES = 1 << 30
NO_GPU = "No NVIDIA GPU is visible: check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
NO_CUPY = "CuPy is not installed: `pip install 'minserve[cuda12]'`, or [cuda13] for a driver of CUDA 13"
PROBE = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n__global__ void probe(half* x) { *x = __float2half(1.0f); }"


def import_cupy() -> Any:
    """CuPy's namespace. BackendError with what to do if there is none."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            raise BackendError(NO_CUPY) from error
        raise BackendError(f"CuPy is installed but can't be imported: {error}") from error
    except OSError as error:  # CuPy 14 makes its cache's folder when it is imported
        raise BackendError(_no_cache(error)) from error


def cuda_major(cp: Any) -> int:
    """Of the CUDA that this CuPy is made for."""
    return int(cp.cuda.runtime.runtimeGetVersion()) // 1000


def check_device(cp: Any) -> None:
    """BackendError naming the first thing that is missing: CuPy's age, driver, GPU, its age, its memory, NVRTC or its
    headers."""
    if int(cp.__version__.partition(".")[0]) < MIN_CUPY:
        raise BackendError(f"CuPy {cp.__version__} is too old: {MIN_CUPY} or later is needed")
    runtime = cp.cuda.runtime
    try:  # not cupy.cuda.is_available: it raises in 13, and doesn't say why not in 14
        if runtime.getDeviceCount() > 0:
            _check_gpu(runtime.getDeviceProperties(0)["name"].decode(), cp.cuda.Device(0))
        else:
            raise BackendError(NO_GPU)
    except runtime.CUDARuntimeError as error:
        raise BackendError(_no_device(cp, error)) from error
    _check_compiler(cp)


def _check_gpu(name: str, device: Any) -> None:
    capability = str(device.compute_capability)
    if int(capability) < MIN_CAPABILITY:
        raise BackendError(
            f"{name} has compute capability {capability[:-1]}.{capability[-1]}; "
            "the kernels need 8.0 or later (A100, RTX 30 series and newer)"
        )
    free, total = device.mem_info
    if free < MIN_FREE_BYTES:
        raise BackendError(
            f"{name} has {free / 1e9:.1f} of {total / 1e9:.1f} GB free; "
            f"stop what else uses it, at least {MIN_FREE_BYTES / 1e9:.1f} GB are needed"
        )


def _check_compiler(cp: Any) -> None:
    try:
        cp.RawModule(code=PROBE, options=("-std=c++17",), name_expressions=("probe",)).get_function("probe")
    except Exception as error:  # NVRTC missing, or its headers: each has a class of its own
        if isinstance(error, OSError) and error.filename is not None:
            raise BackendError(_no_cache(error)) from error
        raise BackendError(
            f"CUDA kernels can't be compiled here; `pip install 'cuda-toolkit[nvrtc,cudart]=={cuda_major(cp)}.*'` "
            f"brings NVRTC and its headers ({_first_line(error)})"
        ) from error


def _no_device(cp: Any, error: Exception) -> str:
    """error: what CUDA said when it was asked for the GPU."""
    driver, built = int(cp.cuda.runtime.driverGetVersion()), int(cp.cuda.runtime.runtimeGetVersion())
    if driver == 0:
        return "No NVIDIA driver was found: install it so that `nvidia-smi` shows the GPU"
    if driver // 1000 < built // 1000:
        older = f", or `pip uninstall cupy-cuda{built // 1000}x` and `pip install 'minserve[cuda12]'`"
        return (
            f"The NVIDIA driver supports CUDA {_version(driver)}, but this CuPy is made for CUDA {_version(built)}: "
            f"update the driver{older if driver // 1000 == 12 else ''}"
        )
    if "cudaErrorNoDevice" in str(error):
        return NO_GPU
    return unusable(error)


def unusable(error: Exception) -> str:
    return f"The GPU can't be used ({_first_line(error)}): `nvidia-smi` shows its state and what else runs on it"


def _no_cache(error: OSError) -> str:
    return f"CuPy can't keep compiled kernels ({error}): set CUPY_CACHE_DIR to a folder that can be written"


@contextmanager
def enough_memory(cp: Any, advice: str) -> Iterator[None]:
    """Inside, GPU memory that doesn't suffice is a BackendError that ends with the advice.

    CuPy's arrays have an error of their own for that; loading a module and making a graph of a capture have CUDA's.
    """
    try:
        yield
    except Exception as error:
        kinds = "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY"
        if isinstance(error, cp.cuda.memory.OutOfMemoryError) or any(kind in str(error) for kind in kinds):
            raise BackendError(f"GPU memory is full: {_first_line(error)}. {advice}") from error
        raise


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def availability(cp: Any = None, library: Any = None) -> str | None:
    """None if a GPU can be used, else one sentence that says what is missing and how to get it."""
    try:
        cp = cp or import_cupy()
        check_device(cp)
        if library is None:
            load_library(cuda_major(cp))
    except BackendError as error:
        return str(error)
    return None
