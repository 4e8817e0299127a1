"""Linear layers: 16 rows of packed weights at a time meet the tokens of a tile.

out[m, n] = sum over k of w[n, k] x[m, k], then bias, residual, or gate and up to act(gate) * up. One source serves 1 to
512 tokens: the vectors of a group of weights stay in registers while the tokens go by, and the sums of a tile (64
tokens x 16 rows) stay in the L1 cache. A token's result does not depend on which tokens stand beside it.

Integers are exact: with weights w = scale * q + minimum and activations x = d * p,
    sum w x = scale * d * sum(q p) + minimum * (d * sum p)
per group; signed formats keep q + offset and get -offset * sum(p) added to the integer sum.

A dot product multiplies bytes, and activations of 8 bits are not accurate enough. p = 256 p1 + p2 carries 16 bits for
twice the dot products. Weights of 4 bits leave half of their byte unused, so three products do for two integers of
almost 12 bits: a byte of the file holds two weights, w = low + 16 high, and is itself an operand. With a = 16 u + s and
b = v + 16 s (quantize.store_shared finds these bytes),
    low a + high b = 16 (low u) + high v + w s
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, name-defined"

from __future__ import annotations

from minserve.backend.numba_backend.dot import (
    add_affine,
    add_bits,
    add_scaled,
    bf16_tile,
    dot_tile,
    high_nibbles,
    low_nibbles,
    tile_bias,
    tile_shift,
    tile_store,
    tile_unbias,
    zeros_f32,
    zeros_i32,
)
from minserve.backend.numba_backend.jit import Kernel, inlined, variant
from minserve.backend.numba_backend.layout import AS_BF16, AS_INT8, AS_INT12, AS_INT16, GROUP, TILE, row_bytes
from minserve.backend.numba_backend.mathlib import F, activate, share
from minserve.backend.numba_backend.quantize import quantize_group
from minserve.backend.numba_backend.simd import (
    i64,
    load_bytes,
    load_f16,
    load_f32,
    load_signed,
    load_u8,
    prefetch,
    splat,
    store_f32,
)

AHEAD = 6400  # bytes; from 1 to 16 KB hardly different
FEW, FEW_BF16 = 2, 4  # tokens up to which memory is what limits: fetching ahead then costs more than it saves

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


# -- one group of weights against n tokens, whose activations are q, d, s, p (see layout): acc[m] += ...
#    dots, one of the next three, takes a tile of tokens through the group. Tiles interleave 8 tokens where there are as
#    many, so that their chains of dot products hide the instruction's latency.


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


# -- one block of 16 rows against a tile of n tokens: acc[m][16] += w . x[m]


@inlined
def parts(x, groups, mode, n):
    """Addresses of q, d, s, p and p of the half groups in a tile of activations."""
    d = x + groups * n * mode
    step = groups * n * 4
    return x, d, d + step, d + 2 * step, d + 3 * step


@inlined
def fetch_ahead(w, g, n, nbytes):
    """Weights go by once a tile, and the processor's own prefetching is late for the first level of its caches. nbytes:
    of a group."""
    if n > FEW:
        for i in range(0, nbytes, 64):
            prefetch(w + g * nbytes + AHEAD + i)


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


@inlined
def block_q4_0(dots, mode, w, groups, n, x, acc):
    q, d, _, p, _ = parts(x, groups, mode, n)
    for g in range(groups):
        fetch_ahead(w, g, n, 288)
        v, s = group_at(w, g, 256, 32)
        i = g * n
        symmetric(dots, nibbles(v), load_f16(s, 0), 3, 0, n, q + i * mode, d + i * 4, p + i * 4, 0, acc)


@inlined
def block_q4_1(dots, mode, w, groups, n, x, acc):
    q, d, sums, _, _ = parts(x, groups, mode, n)
    for g in range(groups):
        fetch_ahead(w, g, n, 320)
        v, s = group_at(w, g, 256, 64)
        scale, minimum, i = load_f16(s, 0), load_f16(s, 16), g * n
        affine(dots, nibbles(v), scale, minimum, n, q + i * mode, d + i * 4, sums + i * 4, acc)


@inlined
def block_q5_0(dots, mode, w, groups, n, x, acc):
    q, d, _, p, _ = parts(x, groups, mode, n)
    for g in range(groups):
        fetch_ahead(w, g, n, 352)
        v, s = group_at(w, g, 320, 32)
        i = g * n
        symmetric(dots, five_bits(v), load_f16(s, 0), 4, 0, n, q + i * mode, d + i * 4, p + i * 4, 0, acc)


@inlined
def block_q5_1(dots, mode, w, groups, n, x, acc):
    q, d, sums, _, _ = parts(x, groups, mode, n)
    for g in range(groups):
        fetch_ahead(w, g, n, 384)
        v, s = group_at(w, g, 320, 64)
        scale, minimum, i = load_f16(s, 0), load_f16(s, 16), g * n
        affine(dots, five_bits(v), scale, minimum, n, q + i * mode, d + i * 4, sums + i * 4, acc)


@inlined
def block_q8_0(dots, mode, w, groups, n, x, acc):
    q, d, _, p, _ = parts(x, groups, mode, n)
    for g in range(groups):
        fetch_ahead(w, g, n, 544)
        v, s = group_at(w, g, 512, 32)
        i = g * n
        symmetric(dots, whole_bytes(v), load_f16(s, 0), 7, 0, n, q + i * mode, d + i * 4, p + i * 4, 0, acc)


@inlined
def block_q4_k(dots, mode, w, groups, n, x, acc):
    q, d, sums, _, _ = parts(x, groups, mode, n)
    for g in range(groups):
        fetch_ahead(w, g, n, 288)
        v, s, f = k_group_at(w, g, 256)
        scale, minimum = load_bytes(s, 0) * load_f16(f, 0), load_bytes(s, 16) * load_f16(f, 16)
        i = g * n
        affine(dots, nibbles(v), scale, minimum, n, q + i * mode, d + i * 4, sums + i * 4, acc)


@inlined
def block_q5_k(dots, mode, w, groups, n, x, acc):
    q, d, sums, _, _ = parts(x, groups, mode, n)
    for g in range(groups):
        fetch_ahead(w, g, n, 352)
        v, s, f = k_group_at(w, g, 320)
        scale, minimum = load_bytes(s, 0) * load_f16(f, 0), load_bytes(s, 16) * load_f16(f, 16)
        i = g * n
        affine(dots, five_bits(v), scale, minimum, n, q + i * mode, d + i * 4, sums + i * 4, acc)


@inlined
def block_q6_k(dots, mode, w, groups, n, x, acc):
    """Groups of 16: two scales per 32 k, whose dot products stay apart."""
    q, d, _, p, half = parts(x, groups, mode, n)
    for g in range(groups):
        fetch_ahead(w, g, n, 416)
        w6, s, f = k_group_at(w, g, 384)
        v, factor = nibbles(w6), load_f16(f, 0)
        scale, i = load_signed(s, 0) * factor, g * n * 4
        qg, dg = q + g * n * mode, d + i
        w16 = six_bits(v[0], v[1], v[2], v[3], load_u8(w6, 256))
        symmetric(dots, w16, scale, 5, 0, n, qg, dg, half + i, 0, acc)
        scale, w16 = load_signed(s, 16) * factor, six_bits(v[4], v[5], v[6], v[7], load_u8(w6, 320))
        symmetric(dots, w16, scale, 5, 16, n, qg, dg, p + i, half + i, acc)


@inlined
def block_bf16(dots, mode, w, groups, n, x, acc):
    """Tokens in tiles of 16, 8, 4, 2 and 1, whose sums stay in registers. x: [K/2][n][2] bfloat16."""
    m = 0
    while m + 16 <= n:
        tile_store(bf16_dots(w, groups * 16, x + m * 4, n * 4, zeros_f32(16)), acc, m * 16, 16)
        m += 16
    if m + 8 <= n:
        tile_store(bf16_dots(w, groups * 16, x + m * 4, n * 4, zeros_f32(8)), acc, m * 16, 16)
        m += 8
    if m + 4 <= n:
        tile_store(bf16_dots(w, groups * 16, x + m * 4, n * 4, zeros_f32(4)), acc, m * 16, 16)
        m += 4
    if m + 2 <= n:
        tile_store(bf16_dots(w, groups * 16, x + m * 4, n * 4, zeros_f32(2)), acc, m * 16, 16)
        m += 2
    if m < n:
        tile_store(bf16_dots(w, groups * 16, x + m * 4, n * 4, zeros_f32(1)), acc, m * 16, 16)


@inlined
def bf16_dots(w, pairs, x, step, tile):
    for k in range(pairs):
        if len(tile) > FEW_BF16:
            prefetch(w + k * 64 + AHEAD)
        tile = bf16_tile(tile, load_u8(w, k * 64), x, k * step, 1)
    return tile


# -- the kernel, once per format


@inlined
def linear(tid, threads, rows, p, block, dots):
    """out[:, 16 b : 16 b + 16] for this thread's row blocks b, its share of `units` equal parts of `unit` blocks.

    x: activations, or this thread's own copy of one row.

    kind 0: out = sum + bias + residual (either may be 0). kind 1, 2: row blocks alternate between gate and up, and
    out = act(gate) * up; with a mode for the output, it is rounded for the next layer: 2 x 2 row blocks make a group.
    """
    out, x, mode, w, block_bytes = i64(p, 0), i64(p, 1), i64(p, 2), i64(p, 3), i64(p, 4)
    blocks, units, unit, cols, stride, kind = i64(p, 5), i64(p, 6), i64(p, 7), i64(p, 8), i64(p, 9), i64(p, 10)
    out_mode, halves, bias, residual = i64(p, 11), i64(p, 12), i64(p, 13), i64(p, 14)
    acc = i64(p, 15) + tid * i64(p, 16)
    if rows == 1 and i64(p, 17):
        x = i64(p, 17) + tid * i64(p, 18)
    u0, u1 = share(units, tid, threads)
    b0 = blocks if u0 == units else u0 * unit
    b1 = blocks if u1 == units else u1 * unit  # padding belongs to the last unit
    together = 1 if kind == 0 else (2 if out_mode == 0 else 4)
    for m0 in range(0, rows, TILE):
        n = min(TILE, rows - m0)
        tile = x + m0 * row_bytes(cols, mode)
        for b in range(b0, b1):
            for i in range(together):
                sums = acc + i * (TILE * 64)
                for m in range(n):
                    store_f32(sums, m * 16, splat(F(0)))
                block(dots, mode, w + (b * together + i) * block_bytes, cols // GROUP, n, tile, sums)
            if kind == 0:
                finish(out, m0 * stride + b * 16, stride, n, acc, bias, residual, b)
            elif out_mode == 0:
                finish_glu(kind, out, m0 * stride + b * 16, stride, n, acc, bias, b)
            else:
                finish_quantized(
                    kind, out + m0 * row_bytes(stride, out_mode), stride, n, acc, bias, b, out_mode, halves
                )


@inlined
def finish(out, i, stride, n, acc, bias, residual, b):
    for m in range(n):
        v = load_f32(acc, m * 16)
        if bias:
            v = v + load_f32(bias, b * 16)
        if residual:
            v = v + load_f32(residual, i + m * stride)
        store_f32(out, i + m * stride, v)


@inlined
def gated(kind, acc, m, bias, i):
    """act(gate) * up of token m; bias 0: none, else its row blocks from i on."""
    gate, up = load_f32(acc, m * 16), load_f32(acc, (TILE + m) * 16)
    if bias:
        gate, up = gate + load_f32(bias, i), up + load_f32(bias, i + 16)
    return activate(kind, gate) * up


@inlined
def finish_glu(kind, out, i, stride, n, acc, bias, b):
    for m in range(n):
        store_f32(out, i + m * stride, gated(kind, acc, m, bias, b * 32))


@inlined
def finish_quantized(kind, tile, cols, n, acc, bias, g, mode, halves):
    for m in range(n):
        low, high = gated(kind, acc, m, bias, g * 64), gated(kind, acc + 2 * TILE * 64, m, bias, g * 64 + 32)
        quantize_group(low, high, tile, n, m, g, cols // GROUP, mode, halves)


FIELDS = (
    "out x mode weights block_bytes blocks units unit cols stride kind out_mode halves bias residual scratch"
    " scratch_stride own own_stride"
)


def _linear(tid, threads, rows, p):
    linear(tid, threads, rows, p, BLOCK_OF_ROWS, DOTS)  # noqa: F821  (bound by variant)


_BLOCKS = {
    "q4_0": block_q4_0,
    "q4_1": block_q4_1,
    "q5_0": block_q5_0,
    "q5_1": block_q5_1,
    "q8_0": block_q8_0,
    "q4_k": block_q4_k,
    "q5_k": block_q5_k,
    "q6_k": block_q6_k,
}
_DOTS = {AS_INT8: ("int8", int8_dots), AS_INT12: ("int12", int12_dots), AS_INT16: ("int16", int16_dots)}


def modes(form: str) -> tuple[int, int]:
    """The fast and the accurate mode of activations for weights of a format."""
    if form == "bf16":
        return AS_BF16, AS_BF16
    return AS_INT8, AS_INT12 if form.startswith("q4") else AS_INT16


LINEAR: dict[tuple[str, int], Kernel] = {  # by format and mode of the activations
    (form, mode): variant(_linear, FIELDS, f"linear_{form}_{_DOTS[mode][0]}", BLOCK_OF_ROWS=block, DOTS=_DOTS[mode][1])
    for form, block in _BLOCKS.items()
    for mode in modes(form)
}
LINEAR["bf16", AS_BF16] = variant(_linear, FIELDS, "linear_bf16", BLOCK_OF_ROWS=block_bf16, DOTS=int8_dots)
