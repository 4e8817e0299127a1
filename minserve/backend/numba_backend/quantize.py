"""Rounding: from float rows to what a linear layer reads, integers or bfloat16.

Owns the rounded form of a row, which layout.py lays out, and the kernel that makes it. It must not know what the row
meets. The norm that precedes a linear layer is computed here, row by row, while the row is in the cache; so it costs no
pass over memory of its own. (Attention's output is rounded where its parts are merged, attention_merge.py.)
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from minserve.backend.numba_backend.jit import helper, inlined, kernel
from minserve.backend.numba_backend.layout import AS_BF16, AS_INT12, AS_INT16, GROUP, TILE, row_bytes
from minserve.backend.numba_backend.mathlib import F, rms_scale, row_share
from minserve.backend.numba_backend.simd_math import fma, hmax, hsum, splat, vabs, vfloor, vmax, vmin, vround
from minserve.backend.numba_backend.simd_memory import (
    f64,
    i32,
    i64,
    load_f32,
    set_f32,
    set_i32,
    store_bf16,
    store_f32,
    store_i8,
)


@inlined
def tile_at(out, rows, m, cols, mode):
    """The tile of row m: its address, its number of tokens, and m's place in it."""
    first = m // TILE * TILE
    return out + first * row_bytes(cols, mode), min(TILE, rows - first), m - first


@helper
def quantize_row(x, out, rows, m, cols, mode, halves):
    """Row m of `rows`, x [cols] (a multiple of 64) -> its place in the block at out."""
    tile, n, m = tile_at(out, rows, m, cols, mode)
    if mode == AS_BF16:
        for g in range(cols // GROUP):
            at = tile + (g * n + m) * 2 * GROUP
            store_bf16(at, 0, load_f32(x, g * 32))
            store_bf16(at, 16, load_f32(x, g * 32 + 16))
    else:
        for g in range(cols // GROUP):
            quantize_group(load_f32(x, g * 32), load_f32(x, g * 32 + 16), tile, n, m, g, cols // GROUP, mode, halves)


@inlined
def quantize_group(a, b, tile, n, m, g, groups, mode, halves):
    """32 activations -> group g of token m: x ~ d * p with integers p, and the bytes q that stand for them.

    halves: whether the sum of the first 16 is wanted too (Q6_K has scales per 16).
    """
    largest = max(hmax(vmax(vabs(a), vabs(b))), F(1e-30))
    most = F(1904.0) if mode == AS_INT12 else F(127.0)
    a, b = a * splat(most / largest), b * splat(most / largest)
    pa, pb = vround(a), vround(b)
    at = g * n + m
    q = tile + at * mode
    scale = largest / most
    if mode == AS_INT12:
        store_shared(q, pa, pb)
    else:
        store_i8(q, 0, pa)
        store_i8(q, 16, pb)
    if mode == AS_INT16:
        k = splat(F(256.0))  # the remainder is at most half a unit: 127 of 256 parts, so +-128 is clamped
        ra, rb = vmin(vround((a - pa) * k), splat(F(127.0))), vmin(vround((b - pb) * k), splat(F(127.0)))
        store_i8(q, 32, ra)
        store_i8(q, 48, rb)
        pa, pb = fma(pa, k, ra), fma(pb, k, rb)
        scale *= F(1 / 256)
    total = hsum(pa + pb)
    step = groups * n * 4
    d = tile + groups * n * mode
    set_f32(d, at, scale)
    set_f32(d + step, at, scale * total)
    set_i32(d + 2 * step, at, -int(total))
    if halves:
        set_i32(d + 3 * step, at, -int(hsum(pa)))


@inlined
def store_shared(q, a, b):
    """Pairs of integers within +-1904 as three signed bytes each: a = 16 u + s, b = v + 16 s. q: u, v, s, 16 of each.

    s must be a modulo 16 and within 8 of b / 16: one of 16 neighbours is, and every byte fits.
    """
    k, sixteenth = splat(F(16.0)), splat(F(1 / 16))
    least = vfloor((b - splat(F(112.0))) * sixteenth)  # the least s with v = b - 16 s <= 127
    over = a - least
    s = a - k * vfloor(over * sixteenth)
    store_i8(q, 0, (a - s) * sixteenth)
    store_i8(q, 16, b - k * s)
    store_i8(q, 32, s)


@kernel("out x padded cols mode halves weight eps gather scratch scratch_stride own own_stride first")
def quantize(tid, threads, rows, p):
    """out[m] = quantized(norm(x[gather[m]])); weight 0: no norm, gather 0: x[m]. first: see linear.py."""
    out, x, padded, cols, mode, halves = i64(p, 0), i64(p, 1), i64(p, 2), i64(p, 3), i64(p, 4), i64(p, 5)
    weight, eps, gather, scratch = i64(p, 6), f64(p, 7), i64(p, 8), i64(p, 9) + tid * i64(p, 10)
    if rows == 1:
        out = i64(p, 11) + tid * i64(p, 12)
    before = i64(i64(p, 13), 0) if i64(p, 13) else 0
    m0, m1 = row_share(rows, tid, threads)
    for m in range(m0, m1):
        i = (i32(gather, m) if gather else before + m) * padded
        if weight:
            s = splat(rms_scale(x, i, padded, cols, eps))
            for j in range(0, padded, 16):
                store_f32(scratch, j, load_f32(x, i + j) * s * load_f32(weight, j))
        else:
            for j in range(0, padded, 16):
                store_f32(scratch, j, load_f32(x, i + j))
        quantize_row(scratch, out, rows, m, padded, mode, halves)
