"""Reading packed weights: 64 bytes are 4 k of 16 rows. See packing.py for the formats.

Owns where a group's vectors and scales lie in a block of 16 rows, and how its bits become bytes: `q4_1(w, g)` and so on
give group g of the block at w. It must not know what it is multiplied with.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from minserve.backend.numba_backend.jit import inlined
from minserve.backend.numba_backend.simd_memory import load_bytes, load_f16, load_signed, load_u8
from minserve.backend.numba_backend.simd_types import I8, Bytes, constant, op, u4x64, u8x64

# -- where a group lies


@inlined
def group_at(w, g, vector_bytes, scale_bytes):
    """Addresses of a group's W and S: records of two groups, W W S S."""
    record, odd = w + g // 2 * 2 * (vector_bytes + scale_bytes), g % 2
    return record + odd * vector_bytes, record + 2 * vector_bytes + odd * scale_bytes


@inlined
def k_group_at(w, g, vector_bytes):
    """The same for a K-quant, and the address of the factors that stand before each eight groups."""
    factors = w + g // 8 * (64 + 8 * (vector_bytes + 32))
    v, s = group_at(factors + 64, g % 8, vector_bytes, 32)
    return v, s, factors


# -- bits of a vector of bytes


@op(u4x64, u8x64)
def low_nibbles(b, v):
    return b.and_(v, constant(I8, 64, 15))


@op(u4x64, u8x64)
def high_nibbles(b, v):
    return b.lshr(v, constant(I8, 64, 4))


@op(u8x64, u4x64)
def times_16(b, v):
    return b.shl(v, constant(I8, 64, 4))


@intrinsic(prefer_literal=True)
def add_bits(context, v, planes, bit, width, to):
    """v | (the `width` bits of each byte of planes from `bit` on) << to, of which v has none; the last three must be
    literals."""
    if not all(isinstance(a, types.IntegerLiteral) for a in (bit, width, to)):
        return None
    shift, mask = to.literal_value - bit.literal_value, ((1 << width.literal_value) - 1) << to.literal_value

    def generate(context, b, sig, args):
        moved = args[1]
        if shift > 0:
            moved = b.shl(moved, constant(I8, 64, shift))
        elif shift < 0:
            moved = b.lshr(moved, constant(I8, 64, -shift))
        return b.or_(args[0], b.and_(moved, constant(I8, 64, mask)))

    return Bytes(to.literal_value + width.literal_value)(v, planes, bit, width, to), generate


# -- unpacking a group: 32 k x 16 rows as a tuple of 8 vectors of bytes, and for nibbles 4 more: the bytes as they are


@inlined
def nibbles(w):
    a, b, c, d = load_u8(w, 0), load_u8(w, 64), load_u8(w, 128), load_u8(w, 192)
    low = (low_nibbles(a), low_nibbles(b), low_nibbles(c), low_nibbles(d))
    return low + (high_nibbles(a), high_nibbles(b), high_nibbles(c), high_nibbles(d), a, b, c, d)  # noqa: RUF005


@inlined
def five_bits(w):
    v, h = nibbles(w), load_u8(w, 256)
    a, b, c, d = (
        add_bits(v[0], h, 0, 1, 4),
        add_bits(v[1], h, 1, 1, 4),
        add_bits(v[2], h, 2, 1, 4),
        add_bits(v[3], h, 3, 1, 4),
    )
    low = (a, b, c, d)
    a, b, c, d = (
        add_bits(v[4], h, 4, 1, 4),
        add_bits(v[5], h, 5, 1, 4),
        add_bits(v[6], h, 6, 1, 4),
        add_bits(v[7], h, 7, 1, 4),
    )
    return low + (a, b, c, d)  # noqa: RUF005


@inlined
def six_bits(a, b, c, d, h):
    """Half a group: four vectors of nibbles, and one with the two high bits of each."""
    return add_bits(a, h, 0, 2, 4), add_bits(b, h, 2, 2, 4), add_bits(c, h, 4, 2, 4), add_bits(d, h, 6, 2, 4)


@inlined
def whole_bytes(w):
    a, b, c, d = load_u8(w, 0), load_u8(w, 64), load_u8(w, 128), load_u8(w, 192)
    return (a, b, c, d, load_u8(w, 256), load_u8(w, 320), load_u8(w, 384), load_u8(w, 448))


# -- a group: its weights, its scale, and its minimum if the format has minima


@inlined
def q4_0(w, g):
    v, s = group_at(w, g, 256, 32)
    return nibbles(v), load_f16(s, 0)


@inlined
def q4_1(w, g):
    v, s = group_at(w, g, 256, 64)
    return nibbles(v), load_f16(s, 0), load_f16(s, 16)


@inlined
def q5_0(w, g):
    v, s = group_at(w, g, 320, 32)
    return five_bits(v), load_f16(s, 0)


@inlined
def q5_1(w, g):
    v, s = group_at(w, g, 320, 64)
    return five_bits(v), load_f16(s, 0), load_f16(s, 16)


@inlined
def q8_0(w, g):
    v, s = group_at(w, g, 512, 32)
    return whole_bytes(v), load_f16(s, 0)


@inlined
def q4_k(w, g):
    v, s, f = k_group_at(w, g, 256)
    return nibbles(v), load_bytes(s, 0) * load_f16(f, 0), load_bytes(s, 16) * load_f16(f, 16)


@inlined
def q5_k(w, g):
    v, s, f = k_group_at(w, g, 320)
    return five_bits(v), load_bytes(s, 0) * load_f16(f, 0), load_bytes(s, 16) * load_f16(f, 16)


@inlined
def q6_k(w, g):
    """Two groups of 16: weights and scale of the first, weights and scale of the second."""
    w6, s, f = k_group_at(w, g, 384)
    v, factor = nibbles(w6), load_f16(f, 0)
    first = six_bits(v[0], v[1], v[2], v[3], load_u8(w6, 256))
    second = six_bits(v[4], v[5], v[6], v[7], load_u8(w6, 320))
    return first, load_signed(s, 0) * factor, second, load_signed(s, 16) * factor
