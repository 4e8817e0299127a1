"""Weights as the kernels read them: 16 rows interleaved, in the quantization of the file, without loss.

Owns the packed formats and the Matrix. It must not know models, nor what is computed with a Matrix.

A row block is 16 rows x K, in sections: W, then scales, then minima. W is made of 64-byte vectors, 16 rows x 4 k each:
one load feeds 16 lanes, so a dot product never needs a sum across lanes. Per 32 k (a group) W holds
    4 bits   4 vectors: low nibbles are k 0..15, high nibbles k 16..31
    5 bits   the same, then one vector whose bit j of each byte belongs to k 4j..4j+3
    6 bits   the same, then two vectors of two bits each: 4 x 2 bits for k 0..15, then k 16..31
    8 bits   8 vectors, weight + 128
and the dense format per 2 k one vector of 16 rows x 2 bfloat16. Scales and minima are float16 per row and group, as
in the file. K-quants keep their two levels: bytes per group, and a float16 per 256 k that multiplies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from minserve.backend.base import BackendError
from minserve.backend.numba_backend.arena import Bytes
from minserve.backend.numba_backend.layout import GROUP, width
from minserve.backend.tensor import BLOCKS, Encoding, Groups, HostTensor, float32_to_bfloat16

Number = TypeVar("Number", bound=np.generic)

ROWS = 16  # of a row block
CHUNK_ROWS = 2048  # rows packed at once: bounds the temporary arrays
VERSION = 1  # of the packed formats: part of the key of what is cached on disk


@dataclass(frozen=True, slots=True)
class Format:
    """A packed format. vectors: 64-byte vectors of W per group of 32 k. minima: whether w = scale * q + minimum.

    offset: what was added to make signed weights unsigned. levels: scales are bytes times a float16 per 256 k.
    """

    name: str
    bits: int
    vectors: int
    minima: bool = False
    offset: int = 0
    levels: bool = False

    def block_bytes(self, cols: int) -> int:
        """Bytes of a row block; cols a multiple of 32 (of 256 with two levels)."""
        groups = cols // GROUP
        if self.bits == 16:
            return groups * self.vectors * 64
        scales = groups * 32
        if self.levels:  # 16 bytes per group (per 16 k where there is no minimum), float16 per 256 k
            scales = groups * (16 if self.minima else 32) + groups // 8 * 32
        total = groups * self.vectors * 64 + scales * (2 if self.minima else 1)
        return -(-total // 64) * 64


BF16 = Format("bf16", 16, 16)
Q4_0, Q4_1 = Format("q4_0", 4, 4, offset=8), Format("q4_1", 4, 4, minima=True)
Q5_0, Q5_1 = Format("q5_0", 5, 5, offset=16), Format("q5_1", 5, 5, minima=True)
Q8_0 = Format("q8_0", 8, 8, offset=128)
Q4_K, Q5_K = Format("q4_k", 4, 4, minima=True, levels=True), Format("q5_k", 5, 5, minima=True, levels=True)
Q6_K = Format("q6_k", 6, 6, offset=32, levels=True)

FORMATS: dict[Encoding, Format] = {
    Encoding.F32: BF16,
    Encoding.F16: BF16,
    Encoding.BF16: BF16,
    Encoding.Q4_0: Q4_0,
    Encoding.Q4_1: Q4_1,
    Encoding.Q5_0: Q5_0,
    Encoding.Q5_1: Q5_1,
    Encoding.Q8_0: Q8_0,
    Encoding.Q4_K: Q4_K,
    Encoding.Q5_K: Q5_K,
    Encoding.Q6_K: Q6_K,
}


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows start..start + rows of a matrix, in one format. data: the row blocks, one after the other."""

    format: Format
    start: int
    rows: int
    data: Bytes
    block_bytes: int

    @property
    def blocks(self) -> int:
        return len(self.data) // self.block_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A linear layer [rows, cols] or an embedding table. bias: float32, padded to the buffer's width.

    pairs: row blocks alternate between gate and up, and rows counts one of the two.
    """

    name: str
    rows: int
    cols: int
    segments: tuple[Segment, ...]
    bias: npt.NDArray[np.float32] | None = None
    pairs: bool = False

    @property
    def nbytes(self) -> int:
        return sum(s.data.nbytes for s in self.segments) + (0 if self.bias is None else self.bias.nbytes)


def padded_rows(rows: int) -> int:
    """Rows of whole 32-column output groups, so that the padding of a result is written as zeros."""
    return width(rows)


def packed_bytes(tensor: HostTensor, form: Format) -> int:
    return padded_rows(tensor.rows) // ROWS * form.block_bytes(width(tensor.cols))


def pack(tensor: HostTensor, form: Format, out: npt.NDArray[np.uint8]) -> None:
    """Write the row blocks of a tensor: out [blocks, block bytes], zeroed, any stride between blocks.

    A tensor of a float encoding in a quantized format is requantized.
    """
    for start in range(0, tensor.rows, CHUNK_ROWS):
        part = tensor.slice_rows(start, min(start + CHUNK_ROWS, tensor.rows))
        blocks = out[start // ROWS : start // ROWS + -(-part.rows // ROWS)]
        if form.bits == 16:
            _pack_bf16(part, blocks)
        else:
            _pack_groups(part, form, blocks)


def _pack_bf16(part: HostTensor, out: Bytes) -> None:
    if part.encoding is Encoding.BF16:
        bits = np.ascontiguousarray(part.data).view(np.uint16)
    else:
        bits = float32_to_bfloat16(part.float32())
    bits = _pad(bits, len(out) * ROWS, width(part.cols))
    out[:] = bits.reshape(len(out), ROWS, -1, 2).swapaxes(1, 2).reshape(len(out), -1).view(np.uint8)


def _pack_groups(part: HostTensor, form: Format, out: Bytes) -> None:
    n, cols = len(out), width(part.cols)
    groups = REQUANTIZE[form.name](part.float32()) if part.encoding in FLOATS else part.groups()
    shift = form.offset if groups.q.dtype == np.int8 else 0  # signed integers: the dot product wants them unsigned
    q = _pad((groups.q.astype(np.int16) + np.int16(shift)).astype(np.uint8), n * ROWS, cols)
    v = q.reshape(n, ROWS, cols // GROUP, 8, 4).transpose(0, 2, 3, 1, 4).reshape(n, cols // GROUP, 8, 64)
    used = cols // GROUP * form.vectors * 64
    out[:, :used] = _vectors(v, form.bits).reshape(n, -1)
    sections = _two_levels(part, groups, form, n) if form.levels else _one_level(groups, form, n)
    for section in sections:
        out[:, used : used + section.shape[1]] = section
        used += section.shape[1]


def _vectors(v: Bytes, bits: int) -> Bytes:
    """v [n, groups, 8, 64], one byte per weight -> the vectors of W [n, groups, vectors, 64]."""
    if bits == 8:
        return v
    parts = [(v[:, :, :4] & 15) | (v[:, :, 4:] & 15) << np.uint8(4)]
    high = v >> np.uint8(4)
    if bits == 5:
        parts.append(np.bitwise_or.reduce([high[:, :, j : j + 1] << np.uint8(j) for j in range(8)]))
    elif bits == 6:
        for first in (0, 4):
            crumbs = [high[:, :, first + j : first + j + 1] << np.uint8(2 * j) for j in range(4)]
            parts.append(np.bitwise_or.reduce(crumbs))
    return np.concatenate(parts, axis=2)


def _one_level(groups: Groups, form: Format, n: int) -> list[Bytes]:
    minima = [groups.minimum] if form.minima and groups.minimum is not None else []
    return [_by_group(values.astype(np.float16), n) for values in (groups.scale, *minima)]


def _two_levels(part: HostTensor, groups: Groups, form: Format, n: int) -> list[Bytes]:
    """Bytes per group, then the float16 factors per 256 k, first of the scales, then of the minima.

    The bytes are recovered from scale = factor * byte: exact, since float32 holds the product without rounding.
    """
    blocks = np.ascontiguousarray(part.data).reshape(part.rows, -1, BLOCKS[part.encoding].nbytes)
    places = (0, 2) if form.minima else (208,)
    sections, factors = [], []
    for values, place, sign in zip((groups.scale, groups.minimum), places, (1, -1), strict=False):
        assert values is not None
        half = np.ascontiguousarray(blocks[..., place : place + 2]).view(np.float16)[..., 0]
        per = values.shape[1] // half.shape[1]
        factor = np.repeat(half.astype(np.float32), per, axis=1) * np.float32(sign)
        byte = np.rint(np.divide(values, factor, out=np.zeros_like(values), where=factor != 0))
        sections.append(_by_group(byte.astype(np.int8 if form is Q6_K else np.uint8), n))
        factors.append(_by_group((half * np.float16(sign)).astype(np.float16), n))
    return sections + factors


def _by_group(values: npt.NDArray[Any], n: int) -> Bytes:
    """[rows, groups] -> the section [n, groups * 16 lanes] as bytes."""
    values = _pad(values, n * ROWS, values.shape[1])
    lanes = np.ascontiguousarray(values.reshape(n, ROWS, -1).swapaxes(1, 2))
    return lanes.reshape(n, -1).view(np.uint8)


def _pad(a: npt.NDArray[Number], rows: int, cols: int) -> npt.NDArray[Number]:
    if a.shape == (rows, cols):
        return np.ascontiguousarray(a)
    return np.pad(a, ((0, rows - a.shape[0]), (0, cols - a.shape[1])))


# -- requantization at load


FLOATS = (Encoding.F32, Encoding.F16, Encoding.BF16)


def _grouped(w: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.pad(w, ((0, 0), (0, width(w.shape[1]) - w.shape[1]))).reshape(len(w), -1, GROUP)


def requantize_q8(w: npt.NDArray[np.float32]) -> Groups:
    """Symmetric: scale = largest magnitude / 127, rounded to float16 first so that the integers fit it."""
    g = _grouped(w)
    scale = (np.abs(g).max(-1) / 127).astype(np.float16).astype(np.float32)
    q = np.rint(g / np.where(scale == 0, 1, scale)[..., None]).clip(-127, 127)
    return Groups(8, GROUP, q.astype(np.int8).reshape(len(w), -1), scale, None)


def requantize_q4(w: npt.NDArray[np.float32]) -> Groups:
    """Range and minimum per group, as Q4_1."""
    g = _grouped(w)
    low, high = g.min(-1).astype(np.float16).astype(np.float32), g.max(-1)
    scale = ((high - low) / 15).astype(np.float16).astype(np.float32)
    q = np.rint((g - low[..., None]) / np.where(scale == 0, 1, scale)[..., None]).clip(0, 15)
    return Groups(4, GROUP, q.astype(np.uint8).reshape(len(w), -1), scale, low)


REQUANTIZE: dict[str, Callable[[npt.NDArray[np.float32]], Groups]] = {"q8_0": requantize_q8, "q4_1": requantize_q4}


def check_columns(tensors: Sequence[HostTensor]) -> int:
    cols = {tensor.cols for tensor in tensors}
    if len(cols) != 1:
        raise BackendError(f"{tensors[0].name}: fused matrices have different numbers of columns, {sorted(cols)}")
    return cols.pop()
