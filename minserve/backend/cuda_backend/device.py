"""Is there a GPU that we can use? If not, one sentence that says what to install.

Owns the diagnosis. It must not know models; it is the only place that asks CuPy about drivers and versions.
"""

from __future__ import annotations

import importlib
from typing import Any

from minserve.backend.base import BackendError
from minserve.backend.cuda_backend.blas import load_library

MIN_CAPABILITY = 80  # mma.sync with bfloat16 and cp.async: Ampere
MIN_FREE_BYTES = 1 << 30
NO_CUPY = "CuPy is not installed: `pip install 'minserve[cuda12]'`, or [cuda13] for a driver of CUDA 13"
PROBE = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n__global__ void probe(half* x) { *x = __float2half(1.0f); }"


def import_cupy() -> Any:
    """CuPy's namespace. BackendError with what to do if there is none."""
    try:
        return importlib.import_module("cupy")
    except ModuleNotFoundError as error:
        raise BackendError(NO_CUPY) from error
    except ImportError as error:
        raise BackendError(f"CuPy is installed but can't be imported: {error}") from error


def check_device(cp: Any) -> None:
    """BackendError naming the first thing that is missing: driver, GPU, its age, its memory, NVRTC or its headers."""
    runtime = cp.cuda.runtime
    if not cp.cuda.is_available():
        raise BackendError(_no_device(runtime))
    device = cp.cuda.Device(0)
    name = runtime.getDeviceProperties(0)["name"].decode()
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
    try:
        cp.RawModule(code=PROBE, options=("-std=c++17",), name_expressions=("probe",)).get_function("probe")
    except Exception as error:  # NVRTC missing, headers missing or too old a CuPy: each has a class of its own
        major = runtime.runtimeGetVersion() // 1000
        raise BackendError(
            f"CUDA kernels can't be compiled here; `pip install 'cuda-toolkit[nvrtc,cudart]=={major}.*'` "
            f"brings NVRTC and its headers ({_first_line(error)})"
        ) from error


def _no_device(runtime: Any) -> str:
    driver = int(runtime.driverGetVersion())
    if driver == 0:
        return "No NVIDIA driver was found: install it so that `nvidia-smi` shows the GPU"
    built = int(runtime.runtimeGetVersion())
    if driver // 1000 < built // 1000:
        return (
            f"The NVIDIA driver supports CUDA {_version(driver)}, but this CuPy is made for CUDA {_version(built)}: "
            f"update the driver, or `pip install cupy-cuda{driver // 1000}x` instead"
        )
    return "No NVIDIA GPU is visible: check `nvidia-smi` and CUDA_VISIBLE_DEVICES"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def availability(cp: Any = None, library: Any = None) -> str | None:
    """None if a GPU can be used, else one sentence that says what is missing and how to get it."""
    try:
        check_device(cp or import_cupy())
        if library is None:
            load_library()
    except BackendError as error:
        return str(error)
    return None
