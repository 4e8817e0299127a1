"""Paged attention over a bfloat16 KV cache: tiles of query rows against blocks of keys, in chunks of 256 keys.

A task is one request, a few of its tokens and one kv head; all query heads of that kv head share each load of keys and
values. Decoding requests are further split by chunks of keys. Chunks begin at multiples of 256 keys and are always
folded in order, each with its own maximum, so a token's result depends on its own keys alone: not on the threads, nor
on batch mates, nor on how its prompt was cut into steps.

Owns the kernels: which tasks a step has, and which thread does which. It must not know what a task does
(attention_task.py).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, name-defined"

from __future__ import annotations

from minserve.backend.numba_backend.amx import HAS_AMX
from minserve.backend.numba_backend.attention_chunk import begin, end
from minserve.backend.numba_backend.attention_merge import first_chunk, partial_count
from minserve.backend.numba_backend.attention_task import attend
from minserve.backend.numba_backend.jit import Kernel, helper, merged, variant
from minserve.backend.numba_backend.layout import BLOCK, CHUNK, HEADER, POSITIONS, REQUESTS, STARTS
from minserve.backend.numba_backend.simd_memory import i32, i64

TASK_COST = 2  # of a task beside its keys, in blocks of keys


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
    """Requests with one token in this step: a task per chunk of keys and kv head, in the order in which they lie. Each
    thread does those that begin in its part of the whole cost. (Dealt in turn, the long chunks of two would all fall to
    one of two threads.)"""
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
                part, h = i // kv_heads, i % kv_heads
                left = cost - part * (CHUNK + TASK_COST)  # of each head, from this chunk on
                task = at + (cost - left) * kv_heads + h * min(left, CHUNK + TASK_COST)
                if begin <= task < end:
                    following = -1, 0, 0
                    if i + 1 < count * kv_heads:
                        following = r, (i + 1) % kv_heads, c0 + (i + 1) // kv_heads
                    elif follower < requests:
                        following = follower, 0, first_chunk(i32(positions, i32(starts, follower)), window)
                    c, place = c0 + part, part if count > 1 else -1
                    attend(shape, (r, i32(starts, r), 1, h, c, c + 1, place, n_rows), following, p, tid)
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
    begin(i64(p, 18))
    attend_ones(tid, threads, p, SHAPE)  # noqa: F821  (bound by variant)
    end()


def _many(tid, threads, rows, p):
    begin(i64(p, 18))
    attend_many(tid, threads, p, SHAPE)  # noqa: F821
    end()


# By rows of a tile. One token: the query heads of a kv head, padded. Several: as many tokens as fill 12 or 16 rows.
ONES: dict[int, Kernel] = {n: variant(_ones, FIELDS, f"attention_ones_{n}", SHAPE=(0,) * n) for n in (*range(1, 9), 16)}
MANY: dict[int, Kernel] = {n: variant(_many, FIELDS, f"attention_many_{n}", SHAPE=(0,) * n) for n in (12, 16)}
MOST_GROUP = 16


def tile_rows(group: int) -> tuple[int, int]:
    """Rows of the two tiles for so many query heads per kv head. Vector registers hold 12 rows better than 16."""
    twelve, sixteen = 12 // group * group, 16 // group * group
    many = 16 if HAS_AMX or twelve <= sixteen - 4 else 12
    return next(n for n in ONES if n >= group), many
