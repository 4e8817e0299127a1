"""Scores and weighted sums of values in the processor's matrix unit (amx.py): keys and values are operands as they lie.

Owns this arithmetic and the layout of queries and weights: rows of bfloat16. It must not know softmax
(attention_chunk.py). Sums are made 32 dims, or 16 keys, at a time, whatever else the unit has to do: a row's bits
depend on its own keys alone.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from minserve.backend.numba_backend.amx import (
    add_bf16_products,
    begin_matrices,
    clear_matrix,
    end_matrices,
    load_matrix,
    store_matrix,
)
from minserve.backend.numba_backend.attention_ahead import block_at
from minserve.backend.numba_backend.jit import inlined, merged
from minserve.backend.numba_backend.layout import BLOCK
from minserve.backend.numba_backend.simd_math import splat
from minserve.backend.numba_backend.simd_memory import i32, load_f32, prefetch_l2, store_bf16

PAIR = 4  # bytes of two dims of a query, or of the weights of two keys
LEFT, SHORT_LEFT, RIGHT, SHORT_RIGHT = 4, 5, 6, 7  # registers; 0 to 3 are sums. Short: 16 dims, or 16 keys
store = store_bf16


@inlined
def begin(n_rows):
    """Before the first chunk of a kernel whose tiles have so many rows."""
    rows = n_rows, 64
    begin_matrices((rows, rows, rows, rows, rows, (n_rows, 32), (16, 64), (8, 64)))


@inlined
def end():
    """After the last."""
    end_matrices()


@merged
def load_queries(row, i, dim, scale, q, r, n_rows, scratch):
    """Query row r, scaled: q [rows][dim]."""
    for j in range(0, dim, 16):
        store_bf16(q, r * dim + j, load_f32(row, i + j) * splat(scale))


@inlined
def fetch(start, nbytes):
    for line in range(0, nbytes, 64):
        prefetch_l2(start + line)


@merged
def scores(zero, n_rows, q, cache, first, last, dim, s, follower, ahead):
    """s [blocks][rows][16 tokens] = q . k for blocks first..last of a request's table, four at a time. Meanwhile what
    is read `ahead` blocks later is fetched."""
    (keys, _, table), nbytes, n = cache, BLOCK * dim * 2, last - first
    wide, each = dim // 32 * 32, n_rows * 64
    for i in range(0, n, 4):
        j, k, m = min(i + 1, n - 1), min(i + 2, n - 1), min(i + 3, n - 1)  # beyond the last block: it again
        a, b = keys + i32(table, first + i) * nbytes, keys + i32(table, first + j) * nbytes
        c, e = keys + i32(table, first + k) * nbytes, keys + i32(table, first + m) * nbytes
        later_a = block_at(i + ahead, n, cache, first, nbytes, follower)
        later_b = block_at(j + ahead, n, cache, first, nbytes, follower)
        later_c = block_at(k + ahead, n, cache, first, nbytes, follower)
        later_e = block_at(m + ahead, n, cache, first, nbytes, follower)
        clear_matrix(0)
        clear_matrix(1)
        clear_matrix(2)
        clear_matrix(3)
        for d in range(0, wide, 32):
            load_matrix(LEFT, q + d * 2, dim * 2)
            load_matrix(RIGHT, a + d * 32, 64)
            add_bf16_products(0, LEFT, RIGHT)
            fetch(later_a + d * 32, 1024)
            load_matrix(RIGHT, b + d * 32, 64)
            add_bf16_products(1, LEFT, RIGHT)
            fetch(later_b + d * 32, 1024)
            load_matrix(RIGHT, c + d * 32, 64)
            add_bf16_products(2, LEFT, RIGHT)
            fetch(later_c + d * 32, 1024)
            load_matrix(RIGHT, e + d * 32, 64)
            add_bf16_products(3, LEFT, RIGHT)
            fetch(later_e + d * 32, 1024)
        if wide < dim:
            load_matrix(SHORT_LEFT, q + wide * 2, dim * 2)
            load_matrix(SHORT_RIGHT, a + wide * 32, 64)
            add_bf16_products(0, SHORT_LEFT, SHORT_RIGHT)
            load_matrix(SHORT_RIGHT, b + wide * 32, 64)
            add_bf16_products(1, SHORT_LEFT, SHORT_RIGHT)
            load_matrix(SHORT_RIGHT, c + wide * 32, 64)
            add_bf16_products(2, SHORT_LEFT, SHORT_RIGHT)
            load_matrix(SHORT_RIGHT, e + wide * 32, 64)
            add_bf16_products(3, SHORT_LEFT, SHORT_RIGHT)
        store_matrix(0, s + i * each, 64)
        store_matrix(1, s + j * each, 64)
        store_matrix(2, s + k * each, 64)
        store_matrix(3, s + m * each, 64)


@merged
def weighted_values(zero, n_rows, weights, cache, first, last, dim, out, follower, ahead):
    """out [rows][dim] = weights . v, summed over the blocks in the unit, 64 dims at a time. weights [blocks][rows][16];
    v [token pairs][dim][2]. follower, ahead: as in scores."""
    (_, values, table), nbytes, n = cache, BLOCK * dim * 2, last - first
    for j in range(0, dim, 64):
        a, b = j, min(j + 16, dim - 16)  # beyond the last dims: they again
        c, e = min(j + 32, dim - 16), min(j + 48, dim - 16)
        clear_matrix(0)
        clear_matrix(1)
        clear_matrix(2)
        clear_matrix(3)
        for i in range(n):
            v = values + i32(table, first + i) * nbytes
            if j == 0:
                fetch(block_at(n + i + ahead, n, cache, first, nbytes, follower), nbytes)
            load_matrix(SHORT_LEFT, weights + i * n_rows * 32, 32)
            load_matrix(SHORT_RIGHT, v + a * 4, dim * 4)
            add_bf16_products(0, SHORT_LEFT, SHORT_RIGHT)
            load_matrix(SHORT_RIGHT, v + b * 4, dim * 4)
            add_bf16_products(1, SHORT_LEFT, SHORT_RIGHT)
            load_matrix(SHORT_RIGHT, v + c * 4, dim * 4)
            add_bf16_products(2, SHORT_LEFT, SHORT_RIGHT)
            load_matrix(SHORT_RIGHT, v + e * 4, dim * 4)
            add_bf16_products(3, SHORT_LEFT, SHORT_RIGHT)
        store_matrix(0, out + a * 4, dim * 4)
        store_matrix(1, out + b * 4, dim * 4)
        store_matrix(2, out + c * 4, dim * 4)
        store_matrix(3, out + e * 4, dim * 4)
