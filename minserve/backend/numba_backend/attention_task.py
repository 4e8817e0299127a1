"""One task of attention: a few tokens of one request and one kv head, over some chunks of its keys.

Owns a thread's scratch and the fold of one chunk after the other, always in order. It must not know how tasks are dealt
to threads (attention.py) or how a chunk is computed (attention_chunk.py).

Softmax with a running maximum: Milakov and Gimelshein 2018; tiles of keys: FlashAttention, Dao et al. 2022.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from minserve.backend.numba_backend.attention_chunk import PAIR, attend_chunk, load_queries
from minserve.backend.numba_backend.attention_merge import merge_weights
from minserve.backend.numba_backend.jit import inlined, merged
from minserve.backend.numba_backend.layout import BLOCK, CHUNK, POSITIONS, STARTS, TABLE_WIDTH, TABLES
from minserve.backend.numba_backend.mathlib import F
from minserve.backend.numba_backend.simd_math import fma, hmax, splat
from minserve.backend.numba_backend.simd_memory import f32, f64, i32, i64, load_f32, set_f32, set_i64, store_f32


@merged
def scratch(p, tid, n_rows, dim):
    """Addresses of a thread's scores, sums of a chunk, running sums, statistics (maximum and denominator) of both, the
    first and last key of each row, weights, queries."""
    s = i64(p, 11) + tid * i64(p, 12)
    sums = s + CHUNK * n_rows * 64
    total = sums + n_rows * dim * 4
    stats = total + n_rows * dim * 4
    totals = stats + n_rows * 8
    limits = totals + n_rows * 8
    weights = limits + n_rows * 16
    return s, sums, total, stats, totals, limits, weights, weights + CHUNK * n_rows * 8 * PAIR


def scratch_bytes(rows: int, dim: int) -> int:
    """The most that `scratch` takes for tiles of up to so many rows."""
    return rows * (CHUNK * 64 + 2 * dim * 4 + 16 + 16 + CHUNK * 8 * PAIR + dim // 2 * PAIR) + 64 * 8


@merged
def start(p, task, q, limits, total, totals, spare):
    """Queries, limits and empty sums of a task's rows."""
    _, t, tokens, h, _, _, _, n_rows = task
    qkv, dim, stride, group = i64(p, 1), i64(p, 6), i64(p, 16), i64(p, 4) // i64(p, 5)
    positions, scale, window = i64(i64(p, 9), POSITIONS), F(f64(p, 14)), i64(p, 17)
    for row in range(n_rows):  # rows beyond the tile's repeat the last token
        at = t + min(row // group, tokens - 1)
        position = i32(positions, at)
        set_i64(limits, 2 * row, max(0, position - window + 1) if window else 0)
        set_i64(limits, 2 * row + 1, position)
        load_queries(qkv, at * stride + (h * group + row % group) * dim, dim, scale, q, row, n_rows, spare)
        set_f32(totals, 2 * row, F(-1e30))
        set_f32(totals, 2 * row + 1, F(0))
    for i in range(0, n_rows * dim, 16):
        store_f32(total, i, splat(F(0)))


@merged
def fold(n_rows, dim, chunk_first, chunk_last, limits, out, stats, total, totals):
    """total, totals <- folded with one chunk's out, stats, for the rows that see any of its keys."""
    for r in range(n_rows):
        if i64(limits, 2 * r) < chunk_last * BLOCK and i64(limits, 2 * r + 1) >= chunk_first * BLOCK:
            top, keep, new = merge_weights(f32(totals, 2 * r), f32(stats, 2 * r))
            set_f32(totals, 2 * r, top)
            denominator = fma(splat(f32(totals, 2 * r + 1)), keep, splat(f32(stats, 2 * r + 1)) * new)
            set_f32(totals, 2 * r + 1, hmax(denominator))
            for j in range(r * dim, r * dim + dim, 16):
                store_f32(total, j, fma(load_f32(total, j), keep, load_f32(out, j) * new))


@merged
def finish(p, task, sums, stats, total, totals):
    """Leave the only chunk's sums and statistics as a part, or the output: total / denominator."""
    r, t, tokens, h, _, _, part, _ = task
    out, partial, slots, heads, dim = i64(p, 0), i64(p, 2), i64(p, 3), i64(p, 4), i64(p, 6)
    group = heads // i64(p, 5)
    for row in range(tokens * group):
        head = h * group + row % group
        if part < 0:
            inverse = splat(F(1.0)) / splat(f32(totals, 2 * row + 1))
            at = (t + row // group) * heads * dim + head * dim
            for j in range(0, dim, 16):
                store_f32(out, at + j, load_f32(total, row * dim + j) * inverse)
        else:
            place = partial + ((r * heads + head) * slots + part) * (dim + 16) * 4
            for j in range(0, dim, 16):
                store_f32(place, j, load_f32(sums, row * dim + j))
            set_f32(place, dim, f32(stats, 2 * row))
            set_f32(place, dim + 1, f32(stats, 2 * row + 1))


@inlined
def chunk_at(p, r, h, c, last):
    """Keys and block ids of chunk c of request r, whose keys end before block `last`, and how many blocks it has."""
    dim, blocks, batch = i64(p, 6), i64(p, 8), i64(p, 9)
    keys = i64(p, 7) + h * blocks * BLOCK * dim * 4
    return keys, i64(batch, TABLES) + (r * i64(batch, TABLE_WIDTH) + c * CHUNK) * 4, min(CHUNK, last - c * CHUNK)


@merged
def attend(shape, task, following, p, tid):
    """One task: `tokens` tokens of request r from token t on, kv head h, chunks of keys c0..c1; part >= 0: leave the
    result of the only chunk as that part. shape: a tuple as long as the tile has rows; their number is also given as
    a value, lest LLVM unroll every loop over them, which takes it many seconds and gains nothing. following: request,
    kv head and chunk of the task that follows; request -1: none."""
    r, t, tokens, h, c0, c1, part, n_rows = task
    dim, blocks, batch, mask, cap = i64(p, 6), i64(p, 8), i64(p, 9), i64(p, 13), F(f64(p, 15))
    starts, positions = i64(batch, STARTS), i64(batch, POSITIONS)
    last = i32(positions, t + tokens - 1) // BLOCK + 1
    keys, table, _ = chunk_at(p, r, h, 0, last)
    cache, follower = (keys, keys + blocks * BLOCK * dim * 2, table), (keys, table, 0)
    next_r, next_h, next_c = following
    if next_r >= 0:
        follower = chunk_at(p, next_r, next_h, next_c, i32(positions, i32(starts, next_r)) // BLOCK + 1)
    s, sums, total, stats, totals, limits, weights, q = scratch(p, tid, n_rows, dim)
    start(p, task, q, limits, total, totals, sums)
    for c in range(c0, c1):
        after = chunk_at(p, r, h, c + 1, last) if c + 1 < c1 else follower
        b0, b1 = c * CHUNK, min(last, (c + 1) * CHUNK)
        attend_chunk(shape, n_rows, q, cache, b0, b1, dim, limits, cap, mask, s, weights, sums, stats, after)
        if part < 0:
            fold(n_rows, dim, b0, b1, limits, sums, stats, total, totals)
    finish(p, task, sums, stats, total, totals)
