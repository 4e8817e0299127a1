"""Paged attention over a bfloat16 KV cache: tiles of query rows against blocks of keys, in chunks of 256 keys.

A task is one request, a few of its tokens and one kv head; all query heads of that kv head share each load of keys and
values. Decoding requests are further split by chunks of keys. Chunks begin at multiples of 256 keys and are always
folded in order, each with its own maximum, so a token's result depends on its own keys alone: not on the threads, nor
on batch mates, nor on how its prompt was cut into steps.

Softmax with a running maximum: Milakov and Gimelshein 2018; tiles of keys: FlashAttention, Dao et al. 2022.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from minserve.backend.numba_backend.dot import bf16_tile, tile_store, zeros_like
from minserve.backend.numba_backend.jit import Kernel, helper, inlined, kernel
from minserve.backend.numba_backend.layout import (
    BLOCK,
    CHUNK,
    HEADER,
    POSITIONS,
    REQUESTS,
    STARTS,
    TABLE_WIDTH,
    TABLES,
)
from minserve.backend.numba_backend.mathlib import F, vexp, vtanh
from minserve.backend.numba_backend.quantize import first_chunk, merge_weights, partial_count
from minserve.backend.numba_backend.simd import (
    f32,
    f64,
    fma,
    hmax,
    hsum,
    i32,
    i64,
    load_f32,
    load_u8,
    prefetch,
    set_f32,
    set_i32,
    set_i64,
    splat,
    store_bf16,
    store_f32,
    vmax,
)


@inlined
def load_queries(row, i, dim, scale, q, r, n_rows, scratch):
    """Query row r, scaled, as bfloat16 pairs: q [dim/2][rows][2]."""
    for j in range(0, dim, 16):
        store_bf16(scratch, j, load_f32(row, i + j) * splat(scale))
    for d in range(dim // 2):
        set_i32(q, d * n_rows + r, i32(scratch, d))


@inlined
def scores(zero, n_rows, q, keys, table, first, last, dim, s):
    """s [blocks][rows][16 tokens] = q . k for blocks first..last of a request's table."""
    words = BLOCK * dim * 4
    for c in range(first, last):
        block = keys + i32(table, c) * words
        follower = keys + i32(table, min(c + 1, last - 1)) * words
        tile = zero
        for d in range(dim // 2):
            prefetch(follower + d * 64)
            prefetch(block + BLOCK * dim * 2 + d * 64)
            tile = bf16_tile(tile, load_u8(block, d * 64), q, d * n_rows * 4, 1)
        tile_store(tile, s, (c - first) * n_rows * 16, 16)


@inlined
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
        e = vexp(load_f32(s, at) - top)
        store_bf16(weights, at, e)
        total = total + e
    return largest, hsum(total)


@inlined
def weighted_values(zero, n_rows, weights, keys, table, first, last, dim, out):
    """out [rows][dim] = weights . v, summed over the blocks in registers. v [token pairs][dim][2]."""
    words = BLOCK * dim * 4
    for j in range(0, dim, 16):
        tile = zero
        for c in range(first, last):
            v = keys + i32(table, c) * words + BLOCK * dim * 2 + j * 4
            w = weights + (c - first) * n_rows * 32
            for t in range(BLOCK // 2):
                tile = bf16_tile(tile, load_u8(v, t * dim * 4), w, t * 4, 8)
        tile_store(tile, out, j, dim)


@helper
def attend_chunk(shape, n_rows, q, keys, table, first, last, dim, limits, cap, mask, s, weights, out, stats):
    """One chunk of keys: out [rows][dim] unnormalized sums, stats [rows][2] maximum and denominator."""
    zero = zeros_like(shape)
    scores(zero, n_rows, q, keys, table, first, last, dim, s)
    for r in range(n_rows):
        first_key, last_key = i64(limits, 2 * r), i64(limits, 2 * r + 1)
        top, total = softmax_row(s, r, n_rows, first, last, first_key, last_key, cap, mask, weights)
        set_f32(stats, 2 * r, top)
        set_f32(stats, 2 * r + 1, total)
    weighted_values(zero, n_rows, weights, keys, table, first, last, dim, out)


@helper
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


@helper
def attend(shape, task, p, tid):
    """One task: `tokens` tokens of request r from token t on, kv head h, chunks of keys c0..c1; part >= 0: leave the
    result of the only chunk as that part. shape: a tuple as long as the tile has rows."""
    n_rows = len(shape)
    r, t, tokens, h, c0, c1, part = task
    out, qkv, partial, slots = i64(p, 0), i64(p, 1), i64(p, 2), i64(p, 3)
    heads, kv_heads, dim, keys, blocks = i64(p, 4), i64(p, 5), i64(p, 6), i64(p, 7), i64(p, 8)
    batch, mask, stride = i64(p, 9), i64(p, 13), i64(p, 16)
    scale, cap, window, group = F(f64(p, 14)), F(f64(p, 15)), i64(p, 17), heads // kv_heads
    table = i64(batch, TABLES) + r * i64(batch, TABLE_WIDTH) * 4
    keys += h * blocks * BLOCK * dim * 4
    # scratch: scores, sums of a chunk, running sums, statistics, limits, weights, queries
    s = i64(p, 11) + tid * i64(p, 12)
    sums = s + CHUNK * n_rows * 64
    total = sums + n_rows * dim * 4
    stats = total + n_rows * dim * 4
    totals = stats + n_rows * 8
    limits = totals + n_rows * 8
    weights = limits + n_rows * 16
    q = weights + CHUNK * n_rows * 32
    positions = i64(batch, POSITIONS)
    for row in range(n_rows):  # rows beyond the tile's repeat the last token
        at = t + min(row // group, tokens - 1)
        position = i32(positions, at)
        set_i64(limits, 2 * row, max(0, position - window + 1) if window else 0)
        set_i64(limits, 2 * row + 1, position)
        load_queries(qkv, at * stride + (h * group + row % group) * dim, dim, scale, q, row, n_rows, sums)
        set_f32(totals, 2 * row, F(-1e30))
        set_f32(totals, 2 * row + 1, F(0))
    for i in range(0, n_rows * dim, 16):
        store_f32(total, i, splat(F(0)))
    last = i32(positions, t + tokens - 1) // BLOCK + 1
    for c in range(c0, c1):
        b0, b1 = c * CHUNK, min(last, (c + 1) * CHUNK)
        attend_chunk(shape, n_rows, q, keys, table, b0, b1, dim, limits, cap, mask, s, weights, sums, stats)
        if part < 0:
            fold(n_rows, dim, b0, b1, limits, sums, stats, total, totals)
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
def attention(tid, threads, p, one, many):
    """Deal the tasks round robin. one, many: tuples whose lengths are the query rows of a tile, for requests with one
    token in this step and with several."""
    kv_heads, batch, tile, window = i64(p, 5), i64(p, 9), i64(p, 10), i64(p, 17)
    header, starts, positions = i64(batch, HEADER), i64(batch, STARTS), i64(batch, POSITIONS)
    task = 0
    for r in range(i64(header, REQUESTS)):
        t0, t1 = i32(starts, r), i32(starts, r + 1)
        if t1 - t0 == 1:
            position = i32(positions, t0)
            count, c0 = partial_count(batch, r, position, window), first_chunk(position, window)
            for h in range(kv_heads):
                for c in range(count):
                    if task % threads == tid:
                        part = c if count > 1 else -1
                        attend(one, (r, t0, 1, h, c0 + c, c0 + c + 1, part), p, tid)
                    task += 1
        else:
            for t in range(t0, t1, tile):
                tokens = min(tile, t1 - t)
                c0 = first_chunk(i32(positions, t), window)
                c1 = i32(positions, t + tokens - 1) // (CHUNK * BLOCK) + 1
                for h in range(kv_heads):
                    if task % threads == tid:
                        attend(many, (r, t, tokens, h, c0, c1, -1), p, tid)
                    task += 1


FIELDS = (
    "out qkv partial slots heads kv_heads dim cache blocks batch tile scratch scratch_stride mask scale softcap stride"
    " window"
)


# One kernel per padded number of query heads that share a kv head: compiled only when a model needs it.


@kernel(FIELDS)
def attention_1(tid, threads, rows, p):
    attention(tid, threads, p, (0,) * 1, (0,) * 12)


@kernel(FIELDS)
def attention_2(tid, threads, rows, p):
    attention(tid, threads, p, (0,) * 2, (0,) * 12)


@kernel(FIELDS)
def attention_4(tid, threads, rows, p):
    attention(tid, threads, p, (0,) * 4, (0,) * 12)


@kernel(FIELDS)
def attention_8(tid, threads, rows, p):
    attention(tid, threads, p, (0,) * 8, (0,) * 16)


@kernel(FIELDS)
def attention_16(tid, threads, rows, p):
    attention(tid, threads, p, (0,) * 16, (0,) * 16)


# (query heads per kv head up to, query rows of a tile with many tokens, kernel)
ATTENTION: tuple[tuple[int, int, Kernel], ...] = (
    (1, 12, attention_1),
    (2, 12, attention_2),
    (4, 12, attention_4),
    (8, 16, attention_8),
    (16, 16, attention_16),
)
MOST_GROUP = 16


def scratch_bytes(group: int, dim: int) -> int:
    """Scratch of one thread."""
    rows = next(max(one, many) for one, many, _ in ATTENTION if group <= one)
    return rows * (CHUNK * 64 + 2 * dim * 4 + 16 + 16 + CHUNK * 32 + dim * 2) + 64 * 8
