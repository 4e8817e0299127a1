"""One chunk of up to 256 keys against a tile of query rows: scores, softmax, weighted sum of values.

Owns attention's arithmetic. It must not know requests or threads: which rows and chunks there are is decided in
attention_task.py and attention.py. Keys and values are bfloat16, laid out for bf16_tile (layout.py): the lanes of a
score are 16 tokens, those of a sum 16 dims, and all rows of the tile share each load.

Where few rows share the keys, memory is what limits. A chunk whose blocks are adjacent is left to the processor's own
prefetching, which does best undisturbed. Other streams are too short for it: values are fetched while their keys are
read, and the next task's keys while values are.

Scores are in units of ln 2 (the queries are scaled by log2 e), so that weights are powers of two.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from minserve.backend.numba_backend.dot import bf16_tile
from minserve.backend.numba_backend.jit import helper, inlined, merged
from minserve.backend.numba_backend.layout import BLOCK
from minserve.backend.numba_backend.mathlib import F, vexp2, vtanh
from minserve.backend.numba_backend.simd_math import hmax, hsum, splat, vmax
from minserve.backend.numba_backend.simd_memory import (
    i32,
    i64,
    load_f32,
    load_u8,
    prefetch_l2,
    set_f32,
    set_i32,
    store_bf16,
    store_f32,
)
from minserve.backend.numba_backend.tile import tile_store, zeros_like


@merged
def load_queries(row, i, dim, scale, q, r, n_rows, scratch):
    """Query row r, scaled, as bfloat16 pairs: q [dim/2][rows][2]."""
    for j in range(0, dim, 16):
        store_bf16(scratch, j, load_f32(row, i + j) * splat(scale))
    for d in range(dim // 2):
        set_i32(q, d * n_rows + r, i32(scratch, d))


@merged
def scores(zero, n_rows, q, cache, first, last, dim, s, fetch_values):
    """s [blocks][rows][16 tokens] = q . k for blocks first..last of a request's table. fetch_values: whether theirs are
    fetched meanwhile."""
    keys, values, table = cache
    nbytes = BLOCK * dim * 2
    for c in range(first, last):
        block, wanted = keys + i32(table, c) * nbytes, values + i32(table, c) * nbytes
        tile = zero
        if fetch_values:
            for d in range(dim // 2):
                prefetch_l2(wanted + d * 64)
                tile = bf16_tile(tile, load_u8(block, d * 64), q, d * n_rows * 4, 1)
        else:
            for d in range(dim // 2):
                tile = bf16_tile(tile, load_u8(block, d * 64), q, d * n_rows * 4, 1)
        tile_store(tile, s, (c - first) * n_rows * 16, 16)


@merged
def mask_scores(s, at, block, first_key, last_key, mask):
    """Hide the keys of one block outside first_key..last_key. mask [17][16]: row n hides all but the first n lanes;
    mask + 17 rows: row n hides the first n."""
    hidden = last_key + 1 - block * BLOCK
    early = first_key - block * BLOCK
    if hidden < BLOCK or early > 0:
        v = load_f32(s, at)
        v = v + load_f32(mask, min(max(hidden, 0), BLOCK) * 16)
        v = v + load_f32(mask, (17 + min(max(early, 0), BLOCK)) * 16)
        store_f32(s, at, v)


@helper
def softmax_row(s, r, n_rows, first, last, first_key, last_key, cap, mask, weights):
    """Row r: weights [blocks][rows][16] = exp(s - max) as bfloat16; returns the maximum and the sum."""
    top = splat(F(-1e30))
    for c in range(last - first):
        at = (c * n_rows + r) * 16
        if cap > F(0):
            store_f32(s, at, splat(cap) * vtanh(load_f32(s, at) * splat(F(1.0) / cap)))
        mask_scores(s, at, first + c, first_key, last_key, mask)
        top = vmax(top, load_f32(s, at))
    largest = hmax(top)
    top, total = splat(largest), splat(F(0))
    for c in range(last - first):
        at = (c * n_rows + r) * 16
        e = vexp2(load_f32(s, at) - top)
        store_bf16(weights, at, e)
        total = total + e
    return largest, hsum(total)


@inlined
def fetch(start, nbytes):
    for line in range(0, nbytes, 64):
        prefetch_l2(start + line)


@merged
def weighted_values(zero, n_rows, weights, cache, first, last, dim, out, ahead):
    """out [rows][dim] = weights . v, summed over the blocks in registers. v [token pairs][dim][2].

    Small tiles take 64 dims at a time, so that values are read from memory in the order in which they lie.
    ahead: keys and block ids of the task that follows, as many blocks of which are fetched meanwhile; keys 0: none.
    """
    _, values, table = cache
    follower, follower_table = ahead
    nbytes, j = BLOCK * dim * 2, 0
    if len(zero) <= 4:
        while j + 64 <= dim:
            a, b, c, d = zero, zero, zero, zero
            for i in range(first, last):
                v = values + i32(table, i) * nbytes + j * 4
                w = weights + (i - first) * n_rows * 32
                if follower:
                    fetch(follower + i32(follower_table, i - first) * nbytes + j * 32, 64 * 32)
                for t in range(BLOCK // 2):
                    a = bf16_tile(a, load_u8(v, t * dim * 4), w, t * 4, 8)
                    b = bf16_tile(b, load_u8(v, t * dim * 4 + 64), w, t * 4, 8)
                    c = bf16_tile(c, load_u8(v, t * dim * 4 + 128), w, t * 4, 8)
                    d = bf16_tile(d, load_u8(v, t * dim * 4 + 192), w, t * 4, 8)
            tile_store(a, out, j, dim)
            tile_store(b, out, j + 16, dim)
            tile_store(c, out, j + 32, dim)
            tile_store(d, out, j + 48, dim)
            j += 64
    while j < dim:
        tile = zero
        for i in range(first, last):
            v = values + i32(table, i) * nbytes + j * 4
            w = weights + (i - first) * n_rows * 32
            if follower:
                fetch(follower + i32(follower_table, i - first) * nbytes + j * 32, 16 * 32)
            for t in range(BLOCK // 2):
                tile = bf16_tile(tile, load_u8(v, t * dim * 4), w, t * 4, 8)
        tile_store(tile, out, j, dim)
        j += 16


@merged
def attend_chunk(shape, n_rows, q, cache, first, last, dim, limits, cap, mask, s, weights, out, stats, ahead):
    """One chunk of keys: out [rows][dim] unnormalized sums, stats [rows][2] maximum and denominator. cache: addresses
    of keys, values and block ids; ahead: of keys and block ids of the task that follows."""
    zero, (_, _, table), (follower, follower_table) = zeros_like(shape), cache, ahead
    if i32(table, last - 1) - i32(table, first) == last - 1 - first:  # adjacent
        follower = 0
    scores(zero, n_rows, q, cache, first, last, dim, s, follower != 0)
    for r in range(n_rows):
        first_key, last_key = i64(limits, 2 * r), i64(limits, 2 * r + 1)
        top, total = softmax_row(s, r, n_rows, first, last, first_key, last_key, cap, mask, weights)
        set_f32(stats, 2 * r, top)
        set_f32(stats, 2 * r + 1, total)
    weighted_values(zero, n_rows, weights, cache, first, last, dim, out, (follower, follower_table))
