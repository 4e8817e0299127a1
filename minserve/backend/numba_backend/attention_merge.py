"""Attention's partial results: how many a token has, how two become one, and the rounding of what they come to.

Owns the fold of softmax's maxima and denominators. It must not know how a part was computed (attention_chunk.py). The
parts of a token are merged row by row while its output is rounded for the next linear layer: no pass of their own.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from minserve.backend.numba_backend.jit import helper, inlined, kernel
from minserve.backend.numba_backend.layout import BLOCK, CHUNK, POSITIONS, REQUEST_OF, STARTS, padded_width
from minserve.backend.numba_backend.mathlib import F, row_share, vexp2
from minserve.backend.numba_backend.quantize import quantize_row
from minserve.backend.numba_backend.simd_math import fma, splat
from minserve.backend.numba_backend.simd_memory import f32, i32, i64, load_f32, store_f32, zero_bytes


@inlined
def first_chunk(position, window):
    """The first chunk of keys that a token sees; window 0: all of them."""
    if window == 0:
        return 0
    return max(0, position - window + 1) // (CHUNK * BLOCK)


@inlined
def partial_count(batch, r, position, window):
    """How many partial results request r's attention leaves: chunks of keys if it has one token, else 1."""
    starts = i64(batch, STARTS)
    if i32(starts, r + 1) - i32(starts, r) > 1:
        return 1
    return position // (CHUNK * BLOCK) - first_chunk(position, window) + 1


@inlined
def merge_weights(total, part):
    """Maximum so far and the part's (of scores in units of ln 2) -> the new one, and what their sums are scaled by."""
    new = max(total, part)
    return new, vexp2(splat(total - new)), vexp2(splat(part - new))


@helper
def merge_row(partial, count, dim, out):
    """Fold the partial results of one head, in order: the same arithmetic as one thread going through all keys.

    partial: count times [D sums, maximum, denominator, padding to D + 16] -> out [D].
    """
    stride = dim + 16
    top, total = F(-1e30), splat(F(0))
    for j in range(0, dim, 16):
        store_f32(out, j, splat(F(0)))
    for c in range(count):
        part = partial + c * stride * 4
        top, keep, new = merge_weights(top, f32(part, dim))
        total = fma(total, keep, splat(f32(part, dim + 1)) * new)
        for j in range(0, dim, 16):
            store_f32(out, j, fma(load_f32(out, j), keep, load_f32(part, j) * new))
    inverse = splat(F(1.0)) / total
    for j in range(0, dim, 16):
        store_f32(out, j, load_f32(out, j) * inverse)


@kernel("out x gather partial slots heads dim window mode halves batch scratch scratch_stride own own_stride first")
def merge_quantize(tid, threads, rows, p):
    """out[m] = quantized(attention output of token gather[m]), merging partial results where its request has one token.

    gather 0: of token m. first: see linear.py.
    """
    out, x, gather, partial, slots, heads = i64(p, 0), i64(p, 1), i64(p, 2), i64(p, 3), i64(p, 4), i64(p, 5)
    dim, window, mode, halves, batch = i64(p, 6), i64(p, 7), i64(p, 8), i64(p, 9), i64(p, 10)
    scratch = i64(p, 11) + tid * i64(p, 12)
    if rows == 1:
        out = i64(p, 13) + tid * i64(p, 14)
    cols = heads * dim
    padded = padded_width(cols)
    zero_bytes(scratch + cols * 4, (padded - cols) * 4)
    before = i64(i64(p, 15), 0) if i64(p, 15) else 0
    m0, m1 = row_share(rows, tid, threads)
    for m in range(m0, m1):
        t = i32(gather, m) if gather else before + m
        r = i32(i64(batch, REQUEST_OF), t)
        count = partial_count(batch, r, i32(i64(batch, POSITIONS), t), window)
        if count > 1:
            for h in range(heads):
                merge_row(partial + (r * heads + h) * slots * (dim + 16) * 4, count, dim, scratch + h * dim * 4)
        else:
            for j in range(0, cols, 16):
                store_f32(scratch, j, load_f32(x, t * cols + j))
        quantize_row(scratch, out, rows, m, padded, mode, halves)
