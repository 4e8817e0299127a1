"""One chunk of up to 256 keys against a tile of query rows: scores, softmax, weighted sum of values.

Owns attention's arithmetic. It must not know requests or threads: which rows and chunks there are is decided in
attention_task.py and attention.py. Keys and values are bfloat16, laid out for bf16_tile (layout.py): the lanes of a
score are 16 tokens, those of a sum 16 dims, and all rows of the tile share each load.

Where few rows share the keys, memory is what limits. A Zen 4 is left alone with a chunk whose blocks are adjacent: its
own prefetching does best undisturbed. Other streams are too short for it: values are fetched while their keys are read,
and the next task's keys while values are. An Intel's own prefetching is late everywhere, so whatever is read is fetched
AHEAD blocks before, in the order of reading.

Scores are in units of ln 2 (the queries are scaled by log2 e), so that weights are powers of two.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from minserve.backend.numba_backend.dot import bf16_tile, float_tile
from minserve.backend.numba_backend.jit import helper, inlined, is_zen, merged
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
    set_i64,
    store_bf16,
    store_f32,
)
from minserve.backend.numba_backend.simd_types import HAS_BF16
from minserve.backend.numba_backend.tile import tile_store, zeros_like

ZEN = is_zen()
AHEAD = 6  # blocks; hardly different from 4 to 8

# Queries and weights are pairs of what keys and values are multiplied with. An Intel (Sapphire Rapids) takes 2 cycles
# for vdpbf16ps, but half a cycle for each of the two fused multiply-adds that do the same.
if HAS_BF16 and ZEN:
    PAIR = 4  # bytes
    dot, store, pair, set_pair = bf16_tile, store_bf16, i32, set_i32
else:
    PAIR = 8
    dot, store, pair, set_pair = float_tile, store_f32, i64, set_i64


@merged
def load_queries(row, i, dim, scale, q, r, n_rows, scratch):
    """Query row r, scaled, as pairs: q [dim/2][rows][2]."""
    for j in range(0, dim, 16):
        store(scratch, j, load_f32(row, i + j) * splat(scale))
    for d in range(dim // 2):
        set_pair(q, d * n_rows + r, pair(scratch, d))


@inlined
def block_at(k, n, cache, first, nbytes, follower):
    """Address of what is read after k blocks of a chunk of n: its keys, its values, keys and values of what follows."""
    (keys, values, table), (next_keys, next_table, next_n) = cache, follower
    if k < n:
        return keys + i32(table, first + k) * nbytes
    if k < 2 * n:
        return values + i32(table, first + k - n) * nbytes
    k -= 2 * n
    if k < next_n:
        return next_keys + i32(next_table, k) * nbytes
    return next_keys + values - keys + i32(next_table, max(0, min(k - next_n, next_n - 1))) * nbytes


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
    """Row r: weights [blocks][rows][16] = exp(s - max) as what `dot` takes; returns the maximum and the sum."""
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
        store(weights, at, e)
        total = total + e
    return largest, hsum(total)


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


@inlined
def distance(adjacent, n, next_n):
    """How many blocks ahead are fetched. next_n: of what follows, 0 if nothing does."""
    if ZEN:
        return 0 if adjacent or next_n == 0 else n
    return AHEAD


@merged
def attend_chunk(shape, n_rows, q, cache, first, last, dim, limits, cap, mask, s, weights, out, stats, follower):
    """One chunk of keys: out [rows][dim] unnormalized sums, stats [rows][2] maximum and denominator. cache: addresses
    of keys, values and block ids; follower: of keys and block ids of what is read after them, and how many blocks."""
    zero, (_, _, table), (_, _, next_n) = zeros_like(shape), cache, follower
    ahead = distance(i32(table, last - 1) - i32(table, first) == last - 1 - first, last - first, next_n)
    scores(zero, n_rows, q, cache, first, last, dim, s, follower, ahead)
    for r in range(n_rows):
        first_key, last_key = i64(limits, 2 * r), i64(limits, 2 * r + 1)
        top, total = softmax_row(s, r, n_rows, first, last, first_key, last_key, cap, mask, weights)
        set_f32(stats, 2 * r, top)
        set_f32(stats, 2 * r + 1, total)
    weighted_values(zero, n_rows, weights, cache, first, last, dim, out, follower, ahead)
