"""One chunk of up to 256 keys against a tile of query rows: scores, softmax, weighted sum of values.

Owns softmax, and which unit of the processor multiplies. It must not know requests or threads: which rows and chunks
there are is decided in attention_task.py and attention.py. Keys and values are bfloat16.

Scores are in units of ln 2 (the queries are scaled by log2 e), so that weights are powers of two.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from minserve.backend.numba_backend import attention_matrix, attention_vectors
from minserve.backend.numba_backend.amx import HAS_AMX
from minserve.backend.numba_backend.attention_ahead import distance
from minserve.backend.numba_backend.jit import helper, merged
from minserve.backend.numba_backend.layout import BLOCK
from minserve.backend.numba_backend.mathlib import F, vexp2, vtanh
from minserve.backend.numba_backend.simd_math import hmax, hsum, splat, vmax
from minserve.backend.numba_backend.simd_memory import i32, i64, load_f32, set_f32, store_f32
from minserve.backend.numba_backend.tile import zeros_like

unit = attention_matrix if HAS_AMX else attention_vectors
PAIR: int = unit.PAIR
begin, end, load_queries = unit.begin, unit.end, unit.load_queries
scores, weighted_values, store = unit.scores, unit.weighted_values, unit.store


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
