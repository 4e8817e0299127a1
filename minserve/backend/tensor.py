"""A weight as its file holds it, and what each quantized encoding means.

Owns nothing: a HostTensor is a view of a (memory-mapped) file. It must not know file formats (weights/ reads those),
devices or models. Every quantized encoding is brought to one scheme, *integers + scale + minimum per group*:
w = scale * q + minimum. Backends repack from that without loss; float32 falls out of it.

Source of the encodings: ggml's block layouts (ggml-common.h / ggml-quants.c), tested against gguf.quants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]


class Encoding(StrEnum):
    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"


@dataclass(frozen=True, slots=True)
class Block:
    """How many weights a block holds and how many bytes it takes."""

    weights: int
    nbytes: int


BLOCKS: dict[Encoding, Block] = {
    Encoding.F32: Block(1, 4),
    Encoding.F16: Block(1, 2),
    Encoding.BF16: Block(1, 2),
    Encoding.Q8_0: Block(32, 34),
    Encoding.Q4_0: Block(32, 18),
    Encoding.Q4_1: Block(32, 20),
    Encoding.Q5_0: Block(32, 22),
    Encoding.Q5_1: Block(32, 24),
    Encoding.Q4_K: Block(256, 144),
    Encoding.Q5_K: Block(256, 176),
    Encoding.Q6_K: Block(256, 210),
}


@dataclass(frozen=True, slots=True)
class Groups:
    """w[n, k] = scale[n, k // size] * q[n, k] + minimum[n, k // size].

    q is unsigned (0 .. 2^bits - 1) where minimum is given, else signed (minimum None = 0).
    """

    bits: int
    size: int
    q: npt.NDArray[np.int8] | npt.NDArray[np.uint8]  # [N, K]
    scale: Float32  # [N, K / size]
    minimum: Float32 | None  # [N, K / size]


def bfloat16_to_float32(bits: npt.NDArray[np.uint16]) -> Float32:
    """Exact widening: a bfloat16 is the upper half of a float32 (subnormals, infinities and NaNs included)."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(x: Float32) -> npt.NDArray[np.uint16]:
    """Round to nearest even; a NaN stays a NaN."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((u + np.uint32(0x7FFF) + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    nan = (u & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, ((u >> 16) | 0x40).astype(np.uint16), rounded)


@dataclass(frozen=True, slots=True)
class HostTensor:
    """shape: [rows, cols] or [cols], logical. data: uint8 [rows, bytes per row] (one row for a vector), read-only."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    data: Bytes

    @property
    def rows(self) -> int:
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def cols(self) -> int:
        return self.shape[-1]

    @classmethod
    def from_array(cls, name: str, array: npt.NDArray[np.float32]) -> HostTensor:
        """A float32 tensor that lives in memory (dummy weights, tests)."""
        a = np.ascontiguousarray(array, np.float32)
        return cls(name, a.shape, Encoding.F32, a.view(np.uint8).reshape(-1, a.shape[-1] * 4))

    def take_rows(self, order: npt.NDArray[np.int64]) -> HostTensor:
        """The same tensor with its rows in another order: lossless in every encoding, blocks lie along columns."""
        data = self.data[order]
        return HostTensor(self.name, (len(order), self.cols), self.encoding, data)

    def slice_rows(self, start: int, stop: int) -> HostTensor:
        return HostTensor(self.name, (stop - start, self.cols), self.encoding, self.data[start:stop])

    def float32(self) -> Float32:
        """The weights as float32, in the tensor's shape."""
        if self.encoding is Encoding.F32:
            out = np.ascontiguousarray(self.data).view(np.float32)
        elif self.encoding is Encoding.F16:
            out = np.ascontiguousarray(self.data).view(np.float16).astype(np.float32)
        elif self.encoding is Encoding.BF16:
            out = bfloat16_to_float32(np.ascontiguousarray(self.data).view(np.uint16))
        else:
            g = self.groups()
            w = g.q.reshape(self.rows, -1, g.size).astype(np.float32)
            w *= g.scale[..., None]
            if g.minimum is not None:
                w += g.minimum[..., None]
            out = w.reshape(self.rows, -1)
        return out.reshape(self.shape)

    def groups(self) -> Groups:
        """The integers, scales and minima of a quantized tensor. ValueError for a float encoding."""
        decode = _DECODERS.get(self.encoding)
        if decode is None:
            raise ValueError(f"{self.name}: {self.encoding} is not a quantized encoding")
        blocks = np.ascontiguousarray(self.data).reshape(self.rows, -1, BLOCKS[self.encoding].nbytes)
        return decode(blocks)


def _half(blocks: Bytes, start: int) -> Float32:
    """The float16 at byte `start` of each block: [N, blocks]."""
    pair = np.ascontiguousarray(blocks[..., start : start + 2])
    return pair.view(np.float16)[..., 0].astype(np.float32)


def _flat(q: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(q).reshape(q.shape[0], -1)


def _nibbles(qs: Bytes) -> Bytes:
    """ggml's order within a block: low nibbles are the first half, high nibbles the second."""
    return np.concatenate([qs & 15, qs >> 4], axis=-1)


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    """The fifth bit of each of 32 weights, as 0 or 16: bit i of a little-endian uint32 belongs to weight i."""
    return np.unpackbits(blocks[..., start : start + 4], axis=-1, bitorder="little") << np.uint8(4)


def _q8_0(b: Bytes) -> Groups:
    q = np.ascontiguousarray(b[..., 2:]).view(np.int8)
    return Groups(8, 32, q.reshape(q.shape[0], -1), _half(b, 0), None)


def _q4_0(b: Bytes) -> Groups:
    scale = _half(b, 0)
    return Groups(4, 32, _flat(_nibbles(b[..., 2:])), scale, scale * np.float32(-8))


def _q4_1(b: Bytes) -> Groups:
    return Groups(4, 32, _flat(_nibbles(b[..., 4:])), _half(b, 0), _half(b, 2))


def _q5_0(b: Bytes) -> Groups:
    scale = _half(b, 0)
    return Groups(5, 32, _flat(_nibbles(b[..., 6:]) | _fifth_bits(b, 2)), scale, scale * np.float32(-16))


def _q5_1(b: Bytes) -> Groups:
    return Groups(5, 32, _flat(_nibbles(b[..., 8:]) | _fifth_bits(b, 4)), _half(b, 0), _half(b, 2))


def _k_scales(b: Bytes) -> tuple[Float32, Float32]:
    """Q4_K and Q5_K: eight 6-bit scales and minima of a super-block, packed in 12 bytes (get_scale_min_k4)."""
    s = b[..., 4:16]
    scale = np.concatenate([s[..., 0:4] & 63, (s[..., 8:12] & 15) | ((s[..., 0:4] >> 6) << 4)], axis=-1)
    minimum = np.concatenate([s[..., 4:8] & 63, (s[..., 8:12] >> 4) | ((s[..., 4:8] >> 6) << 4)], axis=-1)
    d, dmin = _half(b, 0)[..., None], _half(b, 2)[..., None]
    n = b.shape[0]
    return (d * scale).astype(np.float32).reshape(n, -1), (-dmin * minimum).astype(np.float32).reshape(n, -1)


def _k_nibbles(qs: Bytes) -> Bytes:
    """Each 32 bytes hold two groups of 32: low nibbles the first, high nibbles the second."""
    q = qs.reshape(*qs.shape[:-1], 4, 32)
    return np.stack([q & 15, q >> 4], axis=-2).reshape(*qs.shape[:-1], 256)


def _q4_k(b: Bytes) -> Groups:
    scale, minimum = _k_scales(b)
    return Groups(4, 32, _flat(_k_nibbles(b[..., 16:144])), scale, minimum)


def _q5_k(b: Bytes) -> Groups:
    scale, minimum = _k_scales(b)
    high = np.unpackbits(b[..., 16:48], axis=-1, bitorder="little")  # bit j of byte i: weight i of group j
    fifth = high.reshape(*b.shape[:-1], 32, 8).swapaxes(-1, -2).reshape(*b.shape[:-1], 256)
    return Groups(5, 32, _flat(_k_nibbles(b[..., 48:176]) | (fifth << np.uint8(4))), scale, minimum)


def _q6_k(b: Bytes) -> Groups:
    low = b[..., 0:128].reshape(*b.shape[:-1], 2, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-1)  # per half: 128 weights
    high = b[..., 128:192].reshape(*b.shape[:-1], 2, 32)
    high = np.concatenate([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)
    q = (low | (high << 4)).astype(np.int16) - 32
    scales = np.ascontiguousarray(b[..., 192:208]).view(np.int8).astype(np.float32)
    scale = (_half(b, 208)[..., None] * scales).astype(np.float32)
    n = b.shape[0]
    return Groups(6, 16, q.astype(np.int8).reshape(n, -1), scale.reshape(n, -1), None)


_DECODERS: dict[Encoding, Callable[[Bytes], Groups]] = {
    Encoding.Q8_0: _q8_0,
    Encoding.Q4_0: _q4_0,
    Encoding.Q4_1: _q4_1,
    Encoding.Q5_0: _q5_0,
    Encoding.Q5_1: _q5_1,
    Encoding.Q4_K: _q4_k,
    Encoding.Q5_K: _q5_k,
    Encoding.Q6_K: _q6_k,
}
