"""Weights as the kernels read them: 16 rows interleaved, in the quantization of the file, without loss.

Owns the packed formats and the Matrix. It must not know models, nor what is computed with a Matrix.

A row block is 16 rows x K. Its weights (W) are 64-byte vectors, 16 rows x 4 k each: one load feeds 16 lanes, so a dot
product never needs a sum across lanes. Per group of 32 k, W holds
    4 bits   4 vectors: low nibbles are k 0..15, high nibbles k 16..31
    5 bits   the same, then one vector whose bit j of each byte belongs to k 4j..4j+3
    6 bits   the same, then two vectors of two bits each: 4 x 2 bits for k 0..15, then k 16..31
    8 bits   8 vectors, weight + 128
and the dense format 16 vectors of 16 rows x 2 bfloat16. S is, per group, 16 float16 scales (and 16 minima), as in the
file. Two groups make a record, W W S S, of whole cache lines. K-quants keep their two levels: S is bytes, and each four
records begin with a line of the float16 that multiply them. A block is thus read front to back as one stream: with
scales in a section of their own, DRAM gave a third of the bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from minserve.backend.base import BackendError
from minserve.backend.numba_backend.arena import Bytes
from minserve.backend.numba_backend.layout import GROUP, PAIR, width
from minserve.backend.tensor import BLOCKS, Encoding, Groups, HostTensor, float32_to_bfloat16

Number = TypeVar("Number", bound=np.generic)

ROWS = 16  # of a row block
CHUNK_ROWS = 2048  # rows packed at once: bounds the temporary arrays
VERSION = 1  # of the packed formats: part of the key of what is cached on disk


@dataclass(frozen=True, slots=True)
class Format:
    """A packed format. vectors: 64-byte vectors of W per group of 32 k. scale_bytes: of S per group.

    minima: whether w = scale * q + minimum. offset: what was added to make signed weights unsigned. levels: S is bytes
    that are multiplied by a float16 per 256 k.
    """

    name: str
    bits: int
    vectors: int
    scale_bytes: int
    minima: bool = False
    offset: int = 0
    levels: bool = False

    @property
    def record_bytes(self) -> int:
        """Two groups."""
        return 2 * (64 * self.vectors + self.scale_bytes)

    def block_bytes(self, cols: int) -> int:
        """Bytes of a row block; cols a multiple of 64 (of 256 with two levels)."""
        return cols // PAIR * self.record_bytes + (cols // 256 * 64 if self.levels else 0)


BF16 = Format("bf16", 16, 16, 0)
Q4_0, Q4_1 = Format("q4_0", 4, 4, 32, offset=8), Format("q4_1", 4, 4, 64, minima=True)
Q5_0, Q5_1 = Format("q5_0", 5, 5, 32, offset=16), Format("q5_1", 5, 5, 64, minima=True)
Q8_0 = Format("q8_0", 8, 8, 32, offset=128)
Q4_K = Format("q4_k", 4, 4, 32, minima=True, levels=True)
Q5_K = Format("q5_k", 5, 5, 32, minima=True, levels=True)
Q6_K = Format("q6_k", 6, 6, 32, offset=32, levels=True)

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
    w = _vectors(v, form.bits).reshape(n, cols // PAIR, -1)
    if form.levels:
        scales, factors = _two_levels(part, groups, form, n)
        blocks = out.reshape(n, cols // 256, 64 + 4 * form.record_bytes)
        blocks[:, :, : factors.shape[2]] = factors
        blocks[:, :, 64:] = np.concatenate([w, scales], axis=2).reshape(n, cols // 256, -1)
    else:
        scales = _one_level(groups, form, n, cols // GROUP)
        out[:] = np.concatenate([w, scales], axis=2).reshape(n, -1)


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


def _one_level(groups: Groups, form: Format, n: int, count: int) -> Bytes:
    """S of each record: [n, count / 2, 2 * scale bytes]."""
    minima = [groups.minimum] if form.minima and groups.minimum is not None else []
    parts = [_lanes(values.astype(np.float16), n, count) for values in (groups.scale, *minima)]
    return np.concatenate(parts, axis=2).reshape(n, count // 2, -1)


def _two_levels(part: HostTensor, groups: Groups, form: Format, n: int) -> tuple[Bytes, Bytes]:
    """S of each record, and per 256 k the float16 factors of the scales and of the minima.

    The bytes are recovered from scale = factor * byte: exact, since float32 holds the product without rounding.
    """
    blocks = np.ascontiguousarray(part.data).reshape(part.rows, -1, BLOCKS[part.encoding].nbytes)
    places = (0, 2) if form.minima else (208,)
    bytes_, factors = [], []
    for values, place, sign in zip((groups.scale, groups.minimum), places, (1, -1), strict=False):
        assert values is not None
        half = np.ascontiguousarray(blocks[..., place : place + 2]).view(np.float16)[..., 0]
        factor = np.repeat(half.astype(np.float32), values.shape[1] // half.shape[1], axis=1) * np.float32(sign)
        byte = np.rint(np.divide(values, factor, out=np.zeros_like(values), where=factor != 0))
        byte = byte.astype(np.uint8 if form.minima else np.int8)
        bytes_.append(_lanes(byte, n, byte.shape[1]).reshape(n, part.cols // GROUP, -1))
        factors.append(_lanes((half * np.float16(sign)).astype(np.float16), n, half.shape[1]))
    scales = np.concatenate(bytes_, axis=2).reshape(n, part.cols // PAIR, -1)
    return scales, np.concatenate(factors, axis=2)


def _lanes(values: npt.NDArray[Any], n: int, count: int) -> Bytes:
    """[rows, groups] -> [n, count, bytes of 16 rows]."""
    values = _pad(values, n * ROWS, count)
    lanes = np.ascontiguousarray(values.reshape(n, ROWS, count).swapaxes(1, 2))
    return lanes.view(np.uint8).reshape(n, count, -1)


def _pad(a: npt.NDArray[Number], rows: int, cols: int) -> npt.NDArray[Number]:
    if a.shape == (rows, cols):
        return np.ascontiguousarray(a)
    return np.pad(a, ((0, rows - a.shape[0]), (0, cols - a.shape[1])))


# -- requantization at load


FLOATS = (Encoding.F32, Encoding.F16, Encoding.BF16)


def _grouped(w: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return _pad(w, len(w), width(w.shape[1])).reshape(len(w), -1, GROUP)


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
