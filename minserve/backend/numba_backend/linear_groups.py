"""One group of weights, 32 k of 16 rows, against the tokens of a tile: where a linear layer's arithmetic is.

Owns how rounded activations meet integer weights. It must not know how weights are encoded (linear_blocks.py) or what
becomes of the sums (linear.py).

Integers are exact: with weights w = scale * q + minimum and activations x = d * p,
    sum w x = scale * d * sum(q p) + minimum * (d * sum p)
per group; signed formats keep q + offset and get -offset * sum(p) added to the integer sum.

A dot product multiplies bytes, and activations of 8 bits are not accurate enough. p = 256 p1 + p2 carries 16 bits for
twice the dot products. Weights of 4 bits leave half of their byte unused, so three products do for two integers of
almost 12 bits: a byte of the file holds two weights, w = low + 16 high, and is itself an operand. With a = 16 u + s and
b = v + 16 s (quantize.store_shared finds these bytes),
    low a + high b = 16 (low u) + high v + w s
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from minserve.backend.numba_backend.dot import dot_tile
from minserve.backend.numba_backend.jit import inlined
from minserve.backend.numba_backend.layout import AS_INT8, AS_INT12, AS_INT16
from minserve.backend.numba_backend.tile import add_affine, add_scaled, tile_bias, tile_shift, tile_unbias, zeros_i32

# -- a tile of tokens through the group


@inlined
def int8_dots(zeros, w, q, m, first):
    """Tokens m, m + 1, ... with 8 bits; first: byte of a token's q that w starts at."""
    return dot_tile(zeros, w[:8], q, m * AS_INT8 + first, AS_INT8)


@inlined
def int12_dots(zeros, w, q, m, first):
    """The same with three bytes for two integers; w: nibbles."""
    low = tile_shift(dot_tile(zeros, w[:4], q, m * AS_INT12, AS_INT12), 4)
    return dot_tile(low, w[4:], q, m * AS_INT12 + 16, AS_INT12)


@inlined
def int16_dots(zeros, w, q, m, first):
    """The same with 16 bits."""
    high = tile_shift(dot_tile(zeros, w[:8], q, m * AS_INT16 + first, AS_INT16), 8)
    return dot_tile(high, w[:8], q, m * AS_INT16 + first + 32, AS_INT16)


DOTS_BY_MODE = {AS_INT8: ("int8", int8_dots), AS_INT12: ("int12", int12_dots), AS_INT16: ("int16", int16_dots)}

# -- all n tokens: acc[m] += ... Activations are q, d, s, p (see layout.py); dots is one of the above. Tiles interleave
#    8 tokens where there are as many, so that their chains of dot products hide the instruction's latency.


@inlined
def affine(dots, w, scale, minimum, n, q, d, s, acc):
    """Weights scale * w + minimum."""
    m = 0
    while m + 8 <= n:
        add_affine(dots(zeros_i32(8), w, q, m, 0), scale, minimum, d, s, acc, m)
        m += 8
    if m + 4 <= n:
        add_affine(dots(zeros_i32(4), w, q, m, 0), scale, minimum, d, s, acc, m)
        m += 4
    while m < n:
        add_affine(dots(zeros_i32(1), w, q, m, 0), scale, minimum, d, s, acc, m)
        m += 1


@inlined
def symmetric(dots, w, scale, shift, first, n, q, d, p, less, acc):
    """Weights scale * (w - 2^shift). p: minus the sums of q, and less, if not 0, what of them belongs to other
    weights; first: byte of the group's q that w starts at."""
    m = 0
    while m + 8 <= n:
        add_scaled(signed(dots(zeros_i32(8), w, q, m, first), p, less, m, shift), scale, d, acc, m)
        m += 8
    if m + 4 <= n:
        add_scaled(signed(dots(zeros_i32(4), w, q, m, first), p, less, m, shift), scale, d, acc, m)
        m += 4
    while m < n:
        add_scaled(signed(dots(zeros_i32(1), w, q, m, first), p, less, m, shift), scale, d, acc, m)
        m += 1


@inlined
def signed(t, p, less, m, shift):
    """What 2^shift too much in every weight adds to a dot product, taken off."""
    t = tile_bias(t, p, m, shift)
    return tile_unbias(t, less, m, shift) if less else t
