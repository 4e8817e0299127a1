"""Weights on the device: a file's encodings brought into the layouts of kernels_cuda/weights.cuh.

Owns the choice of layout and the upload. Quantized matrices keep the file's integers, scales and minima bit for bit
(Q8_0, Q5_0, Q4_0, Q4_1). Q4_K becomes Q4_1: the same integers, but its scales and minima, products of two numbers, are
rounded to float16. Every other encoding becomes the compute type, 16 bits a weight: Q5_1 and Q5_K would need a minimum
beside 8-bit integers, Q6_K groups of 16. It must not know models or what uses a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minserve.backend.base import BackendError
from minserve.backend.cuda_backend.kernels import Kernels
from minserve.backend.tensor import BLOCKS, Encoding, HostTensor, float32_to_bfloat16

BITS = {"Dense": 16, "Int8": 8, "Int4": 4, "Int4Min": 4}
ALIGNMENT = 8  # columns: kernels move 8 numbers of 16 bits at once
FLOAT16_MAX = 65504.0
SLAB_BYTES = 64 << 20  # of float32 at a time while converting, so that host memory stays bounded
COMPUTE_TYPES = {"half": np.dtype(np.float16), "bf16": np.dtype(np.uint16)}  # NumPy has no bfloat16: its bits


@dataclass(frozen=True, slots=True)
class Matrix:
    """[n, k] in the layout `format`, with an optional float32 bias [n].

    data: uint8 bytes of the rows. scales, minima: float16 per group of 32, None where the format has none.
    """

    format: str
    n: int
    k: int
    data: Any
    scales: Any = None
    minima: Any = None
    bias: Any = None
    pairs: bool = False

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.data, self.scales, self.minima, self.bias) if a is not None)


@dataclass(frozen=True, slots=True)
class Rope:
    """cos and sin by position, float32 [max_len, half]."""

    cos: Any
    sin: Any
    half: int
    max_len: int


def chunks(format: str, k: int) -> int:
    """Chunks of 64 bytes in a row of a quantized matrix."""
    return -(-k // (512 // BITS[format]))


def choose_format(tensors: Sequence[HostTensor]) -> str:
    """The layout that holds the integers of all of these, else Dense."""
    encodings = {Encoding.Q4_1 if fits_q4_1(tensor) else tensor.encoding for tensor in tensors}
    if encodings <= {Encoding.Q4_0}:
        return "Int4"
    if encodings <= {Encoding.Q4_0, Encoding.Q4_1}:
        return "Int4Min"
    if encodings <= {Encoding.Q4_0, Encoding.Q5_0, Encoding.Q8_0}:
        return "Int8"
    return "Dense"


def fits_q4_1(tensor: HostTensor) -> bool:
    """Whether this is a Q4_K tensor whose scales and minima, 6 bits times a float16, are within float16's range.

    None is too small: a product below float16's normal range has a subnormal factor, so it is a multiple of 2^-24 too.
    """
    if tensor.encoding is not Encoding.Q4_K:
        return False
    blocks = tensor.data.reshape(tensor.rows, -1, BLOCKS[Encoding.Q4_K].nbytes)
    factors = np.ascontiguousarray(blocks[..., :4]).view(np.float16)
    return float(np.abs(factors).max()) * 63 <= FLOAT16_MAX  # False for a NaN


def to_q4_1(tensor: HostTensor) -> HostTensor:
    """A Q4_K tensor as Q4_1: the same integers, scales and minima rounded once, by at most 2^-11 of themselves."""
    groups = tensor.groups()
    assert groups.minimum is not None
    halves = groups.q.reshape(*groups.scale.shape, 2, 16)
    blocks = np.empty((*groups.scale.shape, BLOCKS[Encoding.Q4_1].nbytes), np.uint8)
    blocks[..., :4] = np.stack([groups.scale, groups.minimum], -1).astype(np.float16).view(np.uint8)
    blocks[..., 4:] = halves[..., 0, :] | halves[..., 1, :] << 4
    return HostTensor(tensor.name, tensor.shape, Encoding.Q4_1, blocks.reshape(tensor.rows, -1))


class Uploader:
    """Makes device arrays out of host tensors. `compute` is half or bf16."""

    def __init__(self, cp: Any, compute: str) -> None:
        self._cp, self.compute = cp, compute
        self._kernels = Kernels(cp)

    def matrix(self, tensors: Sequence[HostTensor], bias: HostTensor | None = None, *, pairs: bool = False) -> Matrix:
        """Rows of all tensors one after the other."""
        n, k = sum(tensor.rows for tensor in tensors), tensors[0].cols
        if k % ALIGNMENT:
            raise BackendError(f"{tensors[0].name}: {k} columns; the CUDA kernels need a multiple of {ALIGNMENT}")
        format = choose_format(tensors)
        vector = None if bias is None else self.float32(bias.float32())
        if format == "Dense":
            data = self._cp.empty((n, k * 2), np.uint8)
            self._each(tensors, data, self._dense)
            return Matrix(format, n, k, data, bias=vector, pairs=pairs)
        groups = chunks(format, k) * 16 // BITS[format]
        # Zeros, since the groups that fill up a last chunk are never written.
        data = self._cp.zeros((n, chunks(format, k) * 64), np.uint8)
        scales = self._cp.zeros((n, groups), np.float16)
        minima = self._cp.zeros((n, groups), np.float16) if format == "Int4Min" else None
        matrix = Matrix(format, n, k, data, scales, minima, vector, pairs)
        self._each(tensors, matrix, self._repack)
        return matrix

    def float32(self, values: Any) -> Any:
        return self._cp.asarray(np.ascontiguousarray(values, np.float32))

    def _each(self, tensors: Sequence[HostTensor], target: Any, upload: Any) -> None:
        """upload(target, first row, tensor) for slabs of rows."""
        first = 0
        for tensor in tensors:
            step = max(1, SLAB_BYTES // (4 * tensor.cols))
            for start in range(0, tensor.rows, step):
                slab = tensor.slice_rows(start, min(start + step, tensor.rows))
                upload(target, first + start, slab)
            first += tensor.rows
        self._cp.cuda.get_current_stream().synchronize()

    def _dense(self, data: Any, first: int, tensor: HostTensor) -> None:
        numbers = to_compute_type(tensor, self.compute)
        data[first : first + tensor.rows].set(np.ascontiguousarray(numbers).view(np.uint8).reshape(tensor.rows, -1))

    def _repack(self, matrix: Matrix, first: int, tensor: HostTensor) -> None:
        if tensor.encoding is Encoding.Q4_K:
            tensor = to_q4_1(tensor)
        kernel = self._kernels.get("repack", "repack", tensor.encoding.value, matrix.format)
        self._kernels.compile()
        blocks = self._cp.asarray(np.ascontiguousarray(tensor.data))
        threads = tensor.rows * (tensor.cols // 32)
        rows = np.int32(first), np.int32(tensor.rows), np.int32(matrix.k)
        kernel((-(-threads // 256),), 256, matrix.data, matrix.scales, matrix.minima, blocks, *rows)
        self._cp.cuda.get_current_stream().synchronize()  # `blocks` is dropped


def to_compute_type(tensor: HostTensor, compute: str) -> Any:
    """The weights as float16, or as the bits of bfloat16; the file's own numbers where it has that type already."""
    own = {Encoding.F16: "half", Encoding.BF16: "bf16"}.get(tensor.encoding)
    if own == compute:
        return np.ascontiguousarray(tensor.data).view(COMPUTE_TYPES[compute])
    values = tensor.float32()
    if compute == "bf16":
        return float32_to_bfloat16(values)
    with np.errstate(over="ignore"):
        numbers = values.astype(np.float16)
    if np.isinf(numbers).any():
        raise BackendError(f"{tensor.name} has weights beyond float16's range; compute in bfloat16")
    return numbers
