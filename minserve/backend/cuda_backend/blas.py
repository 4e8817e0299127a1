"""Matrix products: cuBLAS through ctypes, with a handle of our own.

cupy.matmul can't be part of a CUDA graph: CuPy refuses every cuBLAS call while its stream is capturing. A handle that
CuPy does not know has no such check, lets us own the workspace (so that cuBLAS allocates nothing during a capture)
and gives float32 results for 16-bit inputs, which cupy.matmul does not. It must not know weights or batches.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from minserve.backend.base import BackendError
from minserve.backend.cuda_backend.kernels import DTYPES

# Values of cudaDataType_t, cublasComputeType_t, cublasGemmAlgo_t, cublasOperation_t, cublasMath_t.
R_32F, R_16F, R_16BF = 0, 2, 14
COMPUTE_32F, GEMM_DEFAULT, OP_N, OP_T = 68, -1, 0, 1
DISALLOW_REDUCED_PRECISION_REDUCTION = 16  # else parts of a sum are rounded to the result's type before they are added
TYPES = {"float": R_32F, "half": R_16F, "bf16": R_16BF}
WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends for Hopper; less is enough elsewhere


def load_library(cuda: int) -> Any:
    """cuBLAS as a ctypes library, of the CUDA that CuPy is made for (12 or 13) if there are several, since the driver
    may be too old for another. BackendError if it can't be found."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib  # type: ignore[import-not-found, unused-ignore]

        return ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path)
    except Exception as error:  # not installed (CuPy 13), or it found nothing: each version raises another class
        reason = error
    pattern = "cublas64_{}.dll" if sys.platform == "win32" else "libcublas.so.{}"
    for version in sorted((12, 13), key=lambda version: version != cuda):
        try:
            return ctypes.CDLL(pattern.format(version))
        except OSError:
            continue
    raise BackendError(f"cuBLAS is missing: `pip install cuda-pathfinder 'cuda-toolkit[cublas]=={cuda}.*'`") from reason


@dataclass(frozen=True, slots=True)
class Output:
    """Columns `first` and on of an array whose rows have `columns` numbers of type half, bf16 or float."""

    array: Any
    type: str
    columns: int
    first: int = 0


class Blas:
    """linear() on the current stream; may be captured. One thread at a time."""

    def __init__(self, cp: Any, library: Any) -> None:
        self._cp, self._library = cp, library
        self._handle = ctypes.c_void_p()
        self._check("cublasCreate_v2", library.cublasCreate_v2(ctypes.byref(self._handle)))
        mode = DISALLOW_REDUCED_PRECISION_REDUCTION
        self._check("cublasSetMathMode", library.cublasSetMathMode(self._handle, mode))
        self._workspace = cp.empty(WORKSPACE_BYTES, np.uint8)
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)

    def linear(self, out: Output, x: Any, weight: Any, m: int, n: int, k: int, type: str) -> None:
        """out[:m, first:first + n] = x[:m] @ weight[:n].T, accumulated in float32; x, weight [., k], row-major."""
        stream = ctypes.c_void_p(self._cp.cuda.get_current_stream().ptr)
        target = out.array.data.ptr + out.first * DTYPES[out.type].itemsize
        pointers = [ctypes.c_void_p(address) for address in (weight.data.ptr, x.data.ptr, target)]
        # Setting the stream resets the workspace, so it is set again after it.
        self._check("cublasSetStream_v2", self._library.cublasSetStream_v2(self._handle, stream))
        workspace = ctypes.c_void_p(self._workspace.data.ptr), ctypes.c_size_t(WORKSPACE_BYTES)
        self._check("cublasSetWorkspace_v2", self._library.cublasSetWorkspace_v2(self._handle, *workspace))
        # cuBLAS is column-major, so it sees transposes: out.T[n, m] = weight[n, k] @ x.T[k, m].
        status = self._library.cublasGemmEx(
            *(self._handle, OP_T, OP_N, n, m, k, ctypes.byref(self._one)),
            *(pointers[0], TYPES[type], k, pointers[1], TYPES[type], k, ctypes.byref(self._zero)),
            *(pointers[2], TYPES[out.type], out.columns, COMPUTE_32F, GEMM_DEFAULT),
        )
        self._check("cublasGemmEx", status)

    @staticmethod
    def _check(call: str, status: int) -> None:
        if status:
            raise BackendError(f"{call} failed with cuBLAS status {status}")
