"""cuBLAS's C interface on NumPy, for fakecupy's memory and streams: what minserve's own Blas calls through ctypes.

Follows the documentation, not our use of it: matrices are column-major, a leading dimension is the distance between
columns, setting the stream drops the workspace. So a swapped argument gives wrong numbers here as it would on a GPU.
A product is captured only in a shape that has run before: cuBLAS loads the kernel it chose at its first launch. Unless
the math mode forbids it, a product is the sum of two that are rounded to the result's type.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from minserve.backend.tensor import bfloat16_to_float32, float32_to_bfloat16
from tests.simt import device_memory
from tests.simt.emulator import KernelError
from tests.simt.fakecupy import memory_at
from tests.simt.fakestream import Stream, submit_kernel

SUCCESS, INVALID_VALUE, INTERNAL_ERROR = 0, 7, 14
_DTYPES: dict[int, type[np.generic]] = {0: np.float32, 2: np.float16, 14: np.uint16}  # cudaDataType_t


class FakeBlas:
    """One library with one handle."""

    def __init__(self) -> None:
        self._stream = Stream.null
        self._workspace = 0, 0  # address, bytes
        self._math = 0  # cublasMath_t
        self._seen: set[tuple[int, ...]] = set()
        self.products = 0

    def cublasCreate_v2(self, handle: Any) -> int:
        handle._obj.value = 1
        return SUCCESS

    def cublasSetMathMode(self, handle: ctypes.c_void_p, mode: int) -> int:
        self._math = mode
        return SUCCESS

    def cublasSetStream_v2(self, handle: ctypes.c_void_p, stream: ctypes.c_void_p) -> int:
        self._stream, self._workspace = Stream._all[stream.value or 0], (0, 0)
        return SUCCESS

    def cublasSetWorkspace_v2(self, handle: ctypes.c_void_p, address: ctypes.c_void_p, size: ctypes.c_size_t) -> int:
        self._workspace = address.value or 0, size.value
        return SUCCESS

    def cublasGemmEx(
        self,
        handle: ctypes.c_void_p,
        transpose_a: int,
        transpose_b: int,
        m: int,
        n: int,
        k: int,
        alpha: Any,
        a: ctypes.c_void_p,
        a_type: int,
        lda: int,
        b: ctypes.c_void_p,
        b_type: int,
        ldb: int,
        beta: Any,
        c: ctypes.c_void_p,
        c_type: int,
        ldc: int,
        compute: int,
        algorithm: int,
    ) -> int:
        """C[m, n] = alpha op(A)[m, k] op(B)[k, n] + beta C."""
        if not self._workspace[1] or compute != 68 or a_type != b_type or c_type not in (a_type, 0) or ldc < m:
            return INVALID_VALUE
        if alpha._obj.value != 1 or beta._obj.value != 0:
            return INVALID_VALUE
        shape_a, shape_b = (k, m) if transpose_a else (m, k), (n, k) if transpose_b else (k, n)
        choice = transpose_a, transpose_b, m, n, k, a_type, c_type
        if self._stream.is_capturing() and choice not in self._seen:
            return INTERNAL_ERROR
        self._seen.add(choice)
        self.products += 1

        operands = (a, a_type, lda, *shape_a), (b, b_type, ldb, *shape_b), (c, c_type, ldc, m, n)
        places = [(address.value or 0, _nbytes(*layout)) for address, *layout in operands]

        def work() -> None:
            if not all(device_memory.written(*place).all() for place in places[:2]):
                raise KernelError("cublasGemmEx reads device memory that nobody has written")
            left, right = _columns(a, a_type, lda, *shape_a), _columns(b, b_type, ldb, *shape_b)
            left, right = left.T if transpose_a else left, right.T if transpose_b else right
            cuts = (0, k) if self._math & 16 else (0, k // 2, k)
            parts = [_rounded(left[:, a:b] @ right[a:b], c_type) for a, b in pairwise(cuts)]
            target = _view(c, c_type, ldc, m, n)
            target[:] = _rounded(np.sum([_floats(part, c_type) for part in parts], 0), c_type)
            noted = device_memory.written(*places[2])
            for column in range(n):
                noted[column * ldc * target.itemsize :][: m * target.itemsize] = 1

        submit_kernel(work, self._stream, [memory_at(*place) for place in (*places, self._workspace)])
        return SUCCESS


def _nbytes(kind: int, leading: int, rows: int, columns: int) -> int:
    """From a matrix's first number to its last."""
    return (leading * (columns - 1) + rows) * np.dtype(_DTYPES[kind]).itemsize


def _view(address: ctypes.c_void_p, kind: int, leading: int, rows: int, columns: int) -> npt.NDArray[Any]:
    """The column-major matrix [rows, columns] at an address."""
    dtype: np.dtype[Any] = np.dtype(_DTYPES[kind])
    size = _nbytes(kind, leading, rows, columns)
    memory = np.frombuffer(memoryview((ctypes.c_char * size).from_address(address.value or 0)), dtype)
    return np.lib.stride_tricks.as_strided(memory, (rows, columns), (dtype.itemsize, leading * dtype.itemsize))


def _rounded(values: npt.NDArray[np.float32], kind: int) -> npt.NDArray[Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        return float32_to_bfloat16(values) if kind == 14 else values.astype(_DTYPES[kind])


def _floats(numbers: npt.NDArray[Any], kind: int) -> npt.NDArray[np.float32]:
    return bfloat16_to_float32(np.ascontiguousarray(numbers)) if kind == 14 else numbers.astype(np.float32)


def _columns(address: ctypes.c_void_p, kind: int, leading: int, rows: int, columns: int) -> npt.NDArray[np.float32]:
    return _floats(_view(address, kind, leading, rows, columns), kind)
