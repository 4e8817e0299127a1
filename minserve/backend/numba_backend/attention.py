"""Paged attention over a bfloat16 KV cache: tiles of query rows against blocks of keys, in chunks of 256 keys.

A task is one request, a few of its tokens and one kv head; all query heads of that kv head share each load of keys and
values. Decoding requests are further split by chunks of keys. Chunks begin at multiples of 256 keys and are always
folded in order, each with its own maximum, so a token's result depends on its own keys alone: not on the threads, nor
on batch mates, nor on how its prompt was cut into steps.

Scores are in units of ln 2 (the queries are scaled by log2 e), so that weights are powers of two.

Softmax with a running maximum: Milakov and Gimelshein 2018; tiles of keys: FlashAttention, Dao et al. 2022.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, name-defined"

from __future__ import annotations

from minserve.backend.numba_backend.dot import bf16_tile, tile_store, zeros_like
from minserve.backend.numba_backend.jit import Kernel, helper, merged, variant
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
from minserve.backend.numba_backend.mathlib import F, vexp2, vtanh
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
    prefetch_l2,
    set_f32,
    set_i32,
    set_i64,
    splat,
    store_bf16,
    store_f32,
    vmax,
)

TASK_COST = 2  # of a task beside its keys, in blocks of keys


@merged
def load_queries(row, i, dim, scale, q, r, n_rows, scratch):
    """Query row r, scaled, as bfloat16 pairs: q [dim/2][rows][2]."""
    for j in range(0, dim, 16):
        store_bf16(scratch, j, load_f32(row, i + j) * splat(scale))
    for d in range(dim // 2):
        set_i32(q, d * n_rows + r, i32(scratch, d))


@merged
def scores(zero, n_rows, q, keys, table, first, last, dim, s, ahead, ahead_table):
    """s [blocks][rows][16 tokens] = q . k for blocks first..last of a request's table.

    ahead, ahead_table: keys and block ids of the task that follows, as many blocks of which are fetched meanwhile; 0:
    nothing is.
    """
    nbytes = BLOCK * dim * 2
    for c in range(first, last):
        block = keys + i32(table, c) * nbytes
        tile = zero
        if ahead:
            follower = ahead + i32(ahead_table, c - first) * nbytes
            for d in range(dim // 2):
                prefetch_l2(follower + d * 64)
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


@merged
def weighted_values(zero, n_rows, weights, values, table, first, last, dim, out):
    """out [rows][dim] = weights . v, summed over the blocks in registers. v [token pairs][dim][2].

    Small tiles take 64 dims at a time, so that values are read from memory in the order in which they lie.
    """
    nbytes, j = BLOCK * dim * 2, 0
    if len(zero) <= 4:
        while j + 64 <= dim:
            a, b, c, d = zero, zero, zero, zero
            for i in range(first, last):
                v = values + i32(table, i) * nbytes + j * 4
                w = weights + (i - first) * n_rows * 32
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
            for t in range(BLOCK // 2):
                tile = bf16_tile(tile, load_u8(v, t * dim * 4), w, t * 4, 8)
        tile_store(tile, out, j, dim)
        j += 16


@merged
def attend_chunk(shape, n_rows, q, cache, first, last, dim, limits, cap, mask, s, weights, out, stats, ahead):
    """One chunk of keys: out [rows][dim] unnormalized sums, stats [rows][2] maximum and denominator. cache: addresses
    of keys, values and block ids; ahead: of keys and block ids of the task that follows."""
    keys, values, table = cache
    zero = zeros_like(shape)
    scores(zero, n_rows, q, keys, table, first, last, dim, s, ahead[0], ahead[1])
    for r in range(n_rows):
        first_key, last_key = i64(limits, 2 * r), i64(limits, 2 * r + 1)
        top, total = softmax_row(s, r, n_rows, first, last, first_key, last_key, cap, mask, weights)
        set_f32(stats, 2 * r, top)
        set_f32(stats, 2 * r + 1, total)
    weighted_values(zero, n_rows, weights, values, table, first, last, dim, out)


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
def attend(shape, task, following, p, tid):
    """One task: `tokens` tokens of request r from token t on, kv head h, chunks of keys c0..c1; part >= 0: leave the
    result of the only chunk as that part. shape: a tuple as long as the tile has rows; their number is also given as
    a value, lest LLVM unroll every loop over them, which takes it many seconds and gains nothing."""
    r, t, tokens, h, c0, c1, part, n_rows = task
    out, qkv, partial, slots = i64(p, 0), i64(p, 1), i64(p, 2), i64(p, 3)
    heads, kv_heads, dim, keys, blocks = i64(p, 4), i64(p, 5), i64(p, 6), i64(p, 7), i64(p, 8)
    batch, mask, stride = i64(p, 9), i64(p, 13), i64(p, 16)
    scale, cap, window, group = F(f64(p, 14)), F(f64(p, 15)), i64(p, 17), heads // kv_heads
    table = i64(batch, TABLES) + r * i64(batch, TABLE_WIDTH) * 4
    next_r, next_h, next_c = following
    follower = keys + next_h * blocks * BLOCK * dim * 4 if next_r >= 0 else 0
    follower_table = i64(batch, TABLES) + (next_r * i64(batch, TABLE_WIDTH) + next_c * CHUNK) * 4
    keys += h * blocks * BLOCK * dim * 4
    cache, ahead = (keys, keys + blocks * BLOCK * dim * 2, table), (follower, follower_table)
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
        attend_chunk(shape, n_rows, q, cache, b0, b1, dim, limits, cap, mask, s, weights, sums, stats, ahead)
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


@helper
def decode_cost(batch, r, window):
    """What one kv head of request r costs if it has one token in this step, else 0: blocks of keys, and TASK_COST for
    each chunk."""
    starts, positions = i64(batch, STARTS), i64(batch, POSITIONS)
    t = i32(starts, r)
    if i32(starts, r + 1) - t != 1:
        return 0
    position = i32(positions, t)
    count = partial_count(batch, r, position, window)
    return position // BLOCK + 1 - first_chunk(position, window) * CHUNK + count * TASK_COST


@helper
def next_decode(batch, requests, r, window):
    """The first request from r on with one token, or `requests`."""
    while r < requests and decode_cost(batch, r, window) == 0:
        r += 1
    return r


@merged
def attend_ones(tid, threads, p, shape):
    """Requests with one token in this step: a task per kv head and chunk of keys. Each thread does those that begin in
    its part of the whole cost. (Dealt in turn, the long chunks of two would all fall to one of two threads.)"""
    kv_heads, batch, window, n_rows = i64(p, 5), i64(p, 9), i64(p, 17), i64(p, 18)
    requests, starts, positions = i64(i64(batch, HEADER), REQUESTS), i64(batch, STARTS), i64(batch, POSITIONS)
    total = 0
    for r in range(requests):
        total += decode_cost(batch, r, window) * kv_heads
    begin, end = total * tid // threads, total * (tid + 1) // threads
    at, r = 0, next_decode(batch, requests, 0, window)
    while r < requests and at < end:
        cost, follower = decode_cost(batch, r, window), next_decode(batch, requests, r + 1, window)
        if at + cost * kv_heads > begin:
            position = i32(positions, i32(starts, r))
            count, c0 = partial_count(batch, r, position, window), first_chunk(position, window)
            for i in range(count * kv_heads):
                task = at + i // count * cost + i % count * (CHUNK + TASK_COST)
                if begin <= task < end:
                    following = -1, 0, 0
                    if i + 1 < count * kv_heads:
                        following = r, (i + 1) // count, c0 + (i + 1) % count
                    elif follower < requests:
                        following = follower, 0, first_chunk(i32(positions, i32(starts, follower)), window)
                    c, part = c0 + i % count, i % count if count > 1 else -1
                    attend(shape, (r, i32(starts, r), 1, i // count, c, c + 1, part, n_rows), following, p, tid)
        at += cost * kv_heads
        r = follower


@merged
def attend_many(tid, threads, p, shape):
    """Requests with several tokens, `tile` of them per task."""
    kv_heads, batch, tile, window, n_rows = i64(p, 5), i64(p, 9), i64(p, 10), i64(p, 17), i64(p, 18)
    header, starts, positions = i64(batch, HEADER), i64(batch, STARTS), i64(batch, POSITIONS)
    task = 0
    for r in range(i64(header, REQUESTS)):
        t0, t1 = i32(starts, r), i32(starts, r + 1)
        if t1 - t0 > 1:
            for t in range(t0, t1, tile):
                tokens = min(tile, t1 - t)
                c0 = first_chunk(i32(positions, t), window)
                c1 = i32(positions, t + tokens - 1) // (CHUNK * BLOCK) + 1
                for h in range(kv_heads):
                    if task % threads == threads - 1 - tid:  # from the other end than attend_ones: evens the load
                        attend(shape, (r, t, tokens, h, c0, c1, -1, n_rows), (-1, 0, 0), p, tid)
                    task += 1


FIELDS = (
    "out qkv partial slots heads kv_heads dim cache blocks batch tile scratch scratch_stride mask scale softcap stride"
    " window tile_rows"
)


def _ones(tid, threads, rows, p):
    attend_ones(tid, threads, p, SHAPE)  # noqa: F821  (bound by variant)


def _many(tid, threads, rows, p):
    attend_many(tid, threads, p, SHAPE)  # noqa: F821


# By rows of a tile. One token: the query heads of a kv head, padded. Several: as many tokens as fill 12 or 16 rows.
ONES: dict[int, Kernel] = {n: variant(_ones, FIELDS, f"attention_ones_{n}", SHAPE=(0,) * n) for n in (1, 2, 4, 8, 16)}
MANY: dict[int, Kernel] = {n: variant(_many, FIELDS, f"attention_many_{n}", SHAPE=(0,) * n) for n in (12, 16)}
MOST_GROUP = 16


def tile_rows(group: int) -> tuple[int, int]:
    """Rows of the two tiles for so many query heads per kv head."""
    return next(n for n in ONES if n >= group), 12 if 12 // group * group > 16 // group * group - 4 else 16


def scratch_bytes(group: int, dim: int) -> int:
    """Scratch of one thread."""
    rows = max(tile_rows(group))
    return rows * (CHUNK * 64 + 2 * dim * 4 + 16 + 16 + CHUNK * 32 + dim * 2) + 64 * 8
