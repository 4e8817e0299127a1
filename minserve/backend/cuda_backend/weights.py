"""Weights on the device: a file's encodings brought into the layouts of kernels_cuda/weights.cuh.

Owns the choice of layout and the upload. Quantized matrices keep the file's integers, scales and minima bit for bit;
only the scales and minima of K encodings, products of two numbers, are rounded to float16. Matrices that are read as
one get the smallest layout that holds them all. It must not know models or what uses a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from minserve.backend.base import BackendError
from minserve.backend.cuda_backend.kernels import DTYPES, Kernels, cdiv, i32
from minserve.backend.tensor import BLOCKS, Encoding, HostTensor, float32_to_bfloat16

ALIGNMENT = 8  # columns: kernels move 8 numbers of 16 bits at once
FLOAT16_MAX = 65504.0
UPLOAD_BYTES = 64 << 20  # of float32 at a time while converting, so that host memory stays bounded


@dataclass(frozen=True, slots=True)
class Layout:
    """bits of an integer; `group` of them share a scale; minimum: whether 32 share one. holds: what fits."""

    bits: int
    group: int
    minimum: bool
    holds: frozenset[Encoding]

    def padded(self, k: int) -> int:
        """Numbers of a row of k, whose last chunk is filled up."""
        chunk = 64 if self.bits == 8 else 128
        return cdiv(k, chunk) * chunk


_UP_TO_6_BITS = frozenset(Encoding[e] for e in ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K"))
LAYOUTS = {  # the smallest first
    "Int4": Layout(4, 32, False, frozenset({Encoding.Q4_0})),
    "Int4Min": Layout(4, 32, True, frozenset({Encoding.Q4_1, Encoding.Q4_K})),
    "Int5Min": Layout(5, 32, True, frozenset(Encoding[e] for e in ("Q4_1", "Q4_K", "Q5_1", "Q5_K"))),
    "Int6Min": Layout(6, 16, True, _UP_TO_6_BITS),
    "Int8": Layout(8, 32, False, frozenset({Encoding.Q4_0, Encoding.Q5_0, Encoding.Q8_0})),
    "Int8Min": Layout(8, 16, True, _UP_TO_6_BITS | {Encoding.Q8_0}),
}
FACTORS = {  # of K encodings' scales and minima: where they stand in a block, and what they are multiplied by at most
    Encoding.Q4_K: (slice(0, 4), 63),
    Encoding.Q5_K: (slice(0, 4), 63),
    Encoding.Q6_K: (slice(208, 210), 128),
}


@dataclass(frozen=True, slots=True)
class Matrix:
    """[n, k] in the layout `format`, or as 16-bit numbers (Dense), with an optional float32 bias [n].

    data: uint8 bytes of the rows. scales, minima: float16, as many as the layout has, None where it has none.
    """

    format: str
    n: int
    k: int
    data: Any
    scales: Any = None
    minima: Any = None
    bias: Any = None
    pairs: bool = False

    @classmethod
    def make(cls, new: Any, format: str, n: int, k: int, *, bias: Any = None, pairs: bool = False) -> Matrix:
        """new(shape, dtype) makes its arrays."""
        if format == "Dense":
            return cls(format, n, k, new((n, k * 2), np.uint8), bias=bias, pairs=pairs)
        layout = LAYOUTS[format]
        numbers = layout.padded(k)
        data, scales = new((n, numbers * layout.bits // 8), np.uint8), new((n, numbers // layout.group), np.float16)
        minima = new((n, numbers // 32), np.float16) if layout.minimum else None
        return cls(format, n, k, data, scales, minima, bias, pairs)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.data, self.scales, self.minima, self.bias) if a is not None)


@dataclass(frozen=True, slots=True)
class Rope:
    """cos and sin by position, float32 [max_len, half]."""

    cos: Any
    sin: Any
    half: int


def choose_format(tensors: Sequence[HostTensor]) -> str:
    """The smallest layout that holds all of these, else Dense."""
    encodings = {tensor.encoding for tensor in tensors}
    formats = (format for format, layout in LAYOUTS.items() if encodings <= layout.holds)
    return next(formats, "Dense") if all(map(fits_float16, tensors)) else "Dense"


def fits_float16(tensor: HostTensor) -> bool:
    """Whether float16 has room for the scales and minima of a K encoding: small integers times a float16.

    None is too small: a product below float16's normal range has a subnormal factor, so it is a multiple of 2^-24 too.
    """
    if tensor.encoding not in FACTORS:
        return True
    where, largest = FACTORS[tensor.encoding]
    blocks = tensor.data.reshape(-1, BLOCKS[tensor.encoding].nbytes)
    factors = np.ascontiguousarray(blocks[:, where]).view(np.float16)
    return float(np.abs(factors).max(initial=0)) * largest <= FLOAT16_MAX  # False for a NaN


Upload = Callable[[Matrix, int, HostTensor], None]  # is over when it returns


class Uploader:
    """Makes device arrays out of host tensors. `compute` is half or bf16."""

    def __init__(self, cp: Any, compute: str) -> None:
        self._cp, self._compute = cp, compute
        self._kernels = Kernels(cp)

    def matrix(self, tensors: Sequence[HostTensor], bias: HostTensor | None = None, *, pairs: bool = False) -> Matrix:
        """Rows of all tensors one after the other."""
        n, k = sum(tensor.rows for tensor in tensors), tensors[0].cols
        if k % ALIGNMENT:
            raise BackendError(f"{tensors[0].name}: {k} columns; the CUDA kernels need a multiple of {ALIGNMENT}")
        format = choose_format(tensors)
        vector = None if bias is None else self.float32(bias.float32())
        # Zeros: the groups that fill up a last chunk are never written, and upper bits are added to them.
        new = self._cp.empty if format == "Dense" else self._cp.zeros
        matrix = Matrix.make(new, format, n, k, bias=vector, pairs=pairs)
        self._each(tensors, matrix, self._dense if format == "Dense" else self._repack)
        return matrix

    def float32(self, values: npt.NDArray[Any]) -> Any:
        return self._cp.asarray(np.ascontiguousarray(values, np.float32))

    def _each(self, tensors: Sequence[HostTensor], target: Matrix, upload: Upload) -> None:
        """upload(target, first row, tensor) for slabs of rows."""
        first = 0
        for tensor in tensors:
            step = max(1, UPLOAD_BYTES // (4 * tensor.cols))
            for start in range(0, tensor.rows, step):
                slab = tensor.slice_rows(start, min(start + step, tensor.rows))
                upload(target, first + start, slab)
            first += tensor.rows

    def _dense(self, matrix: Matrix, first: int, tensor: HostTensor) -> None:
        numbers = to_compute_type(tensor, self._compute)
        rows = matrix.data[first : first + tensor.rows]
        rows.set(np.ascontiguousarray(numbers).view(np.uint8).reshape(tensor.rows, -1))
        self._cp.cuda.get_current_stream().synchronize()  # `numbers` is dropped, and the copy may read it until then

    def _repack(self, matrix: Matrix, first: int, tensor: HostTensor) -> None:
        kernel = self._kernels.get("repack", "repack", tensor.encoding.value, matrix.format)
        self._kernels.compile()
        blocks = self._cp.asarray(np.ascontiguousarray(tensor.data))
        threads = tensor.rows * (tensor.cols // 32)
        rows = i32(first), i32(tensor.rows), i32(matrix.k)
        kernel((cdiv(threads, 256),), 256, matrix.data, matrix.scales, matrix.minima, blocks, *rows)
        self._cp.cuda.get_current_stream().synchronize()  # `blocks` is dropped


def to_compute_type(tensor: HostTensor, compute: str) -> npt.NDArray[Any]:
    """The weights as float16, or as the bits of bfloat16; the file's own numbers where it has that type already."""
    own = {Encoding.F16: "half", Encoding.BF16: "bf16"}.get(tensor.encoding)
    if own == compute:
        return np.ascontiguousarray(tensor.data).view(DTYPES[compute])
    values = tensor.float32()
    if compute == "bf16":
        return float32_to_bfloat16(values)
    with np.errstate(over="ignore"):
        numbers = values.astype(np.float16)
    if np.isinf(numbers).any():
        raise BackendError(f"{tensor.name} has weights beyond float16's range; compute in bfloat16")
    return numbers
