"""Scores and weighted sums of values in the vector units: keys and values as bf16_tile takes them (layout.py).

Owns this arithmetic and the layout of queries and weights. It must not know softmax (attention_chunk.py). The lanes of
a score are 16 tokens, those of a sum 16 dims, and all rows of the tile share each load.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from minserve.backend.numba_backend.attention_ahead import ZEN, block_at
from minserve.backend.numba_backend.dot import bf16_tile, float_tile
from minserve.backend.numba_backend.jit import merged
from minserve.backend.numba_backend.layout import BLOCK
from minserve.backend.numba_backend.simd_math import splat
from minserve.backend.numba_backend.simd_memory import (
    i32,
    i64,
    load_f32,
    load_u8,
    prefetch_l2,
    set_i32,
    set_i64,
    store_bf16,
    store_f32,
)
from minserve.backend.numba_backend.simd_types import HAS_BF16
from minserve.backend.numba_backend.tile import tile_store

# Queries and weights are pairs of what keys and values are multiplied with. An Intel (Sapphire Rapids) takes 2 cycles
# for vdpbf16ps, but half a cycle for each of the two fused multiply-adds that do the same.
if HAS_BF16 and ZEN:
    PAIR = 4  # bytes
    dot, store, pair, set_pair = bf16_tile, store_bf16, i32, set_i32
else:
    PAIR = 8
    dot, store, pair, set_pair = float_tile, store_f32, i64, set_i64


@merged
def begin(n_rows):
    """Before the first chunk of a kernel whose tiles have so many rows."""


@merged
def end():
    """After the last."""


@merged
def load_queries(row, i, dim, scale, q, r, n_rows, scratch):
    """Query row r, scaled, as pairs: q [dim/2][rows][2]."""
    for j in range(0, dim, 16):
        store(scratch, j, load_f32(row, i + j) * splat(scale))
    for d in range(dim // 2):
        set_pair(q, d * n_rows + r, pair(scratch, d))


@merged
def scores(zero, n_rows, q, cache, first, last, dim, s, follower, ahead):
    """s [blocks][rows][16 tokens] = q . k for blocks first..last of a request's table. Meanwhile what is read `ahead`
    blocks later is fetched; 0: nothing."""
    (keys, _, table), nbytes, n = cache, BLOCK * dim * 2, last - first
    c = 0
    if len(zero) <= 4 and not ZEN:  # two blocks at a time, or so few chains of sums would wait for themselves
        while c < n:
            e = min(c + 1, n - 1)
            one, other = keys + i32(table, first + c) * nbytes, keys + i32(table, first + e) * nbytes
            wanted = block_at(c + ahead, n, cache, first, nbytes, follower)
            also = block_at(e + ahead, n, cache, first, nbytes, follower)
            a, b = zero, zero
            for d in range(dim // 2):
                prefetch_l2(wanted + d * 64)
                prefetch_l2(also + d * 64)
                a = dot(a, load_u8(one, d * 64), q, d * n_rows * PAIR, 1)
                b = dot(b, load_u8(other, d * 64), q, d * n_rows * PAIR, 1)
            tile_store(a, s, c * n_rows * 16, 16)
            tile_store(b, s, e * n_rows * 16, 16)
            c += 2
    while c < n:
        block, tile = keys + i32(table, first + c) * nbytes, zero
        if ahead:
            wanted = block_at(c + ahead, n, cache, first, nbytes, follower)
            for d in range(dim // 2):
                prefetch_l2(wanted + d * 64)
                tile = dot(tile, load_u8(block, d * 64), q, d * n_rows * PAIR, 1)
        else:
            for d in range(dim // 2):
                tile = dot(tile, load_u8(block, d * 64), q, d * n_rows * PAIR, 1)
        tile_store(tile, s, c * n_rows * 16, 16)
        c += 1


@merged
def weighted_values(zero, n_rows, weights, cache, first, last, dim, out, follower, ahead):
    """out [rows][dim] = weights . v, summed over the blocks in registers. v [token pairs][dim][2].

    Small tiles take 64 dims at a time, so that values are read from memory in the order in which they lie. follower,
    ahead: as in scores.
    """
    (_, values, table), nbytes, n, j = cache, BLOCK * dim * 2, last - first, 0
    if len(zero) <= 4:
        while j + 64 <= dim:
            a, b, c, d = zero, zero, zero, zero
            for i in range(n):
                v = values + i32(table, first + i) * nbytes + j * 4
                w = weights + i * n_rows * 8 * PAIR
                wanted = block_at(n + i + ahead, n, cache, first, nbytes, follower) + j * 4 if ahead else 0
                for t in range(BLOCK // 2):
                    if ahead:
                        for line in range(0, 256, 64):
                            prefetch_l2(wanted + t * dim * 4 + line)
                    a = dot(a, load_u8(v, t * dim * 4), w, t * PAIR, 8)
                    b = dot(b, load_u8(v, t * dim * 4 + 64), w, t * PAIR, 8)
                    c = dot(c, load_u8(v, t * dim * 4 + 128), w, t * PAIR, 8)
                    d = dot(d, load_u8(v, t * dim * 4 + 192), w, t * PAIR, 8)
            tile_store(a, out, j, dim)
            tile_store(b, out, j + 16, dim)
            tile_store(c, out, j + 32, dim)
            tile_store(d, out, j + 48, dim)
            j += 64
    while j < dim:
        tile = zero
        for i in range(n):
            v = values + i32(table, first + i) * nbytes + j * 4
            w = weights + i * n_rows * 8 * PAIR
            wanted = block_at(n + i + ahead, n, cache, first, nbytes, follower) + j * 4 if ahead else 0
            for t in range(BLOCK // 2):
                if ahead:
                    prefetch_l2(wanted + t * dim * 4)
                tile = dot(tile, load_u8(v, t * dim * 4), w, t * PAIR, 8)
        tile_store(tile, out, j, dim)
        j += 16
