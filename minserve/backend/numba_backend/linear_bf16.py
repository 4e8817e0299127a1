"""bfloat16 weights in the matrix unit: they are operands as they lie, and sums need no scale.

Owns the order of work: up to four tiles of 16 tokens pass a block of 16 rows together. The unit serves one token too,
so that a token's bits never depend on how many there are. It must not know where this is chosen (linear_matrix.py).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from minserve.backend.numba_backend.amx import (
    UNUSED,
    add_bf16_products,
    begin_matrices,
    clear_matrix,
    load_matrix,
    store_matrix,
)
from minserve.backend.numba_backend.jit import inlined
from minserve.backend.numba_backend.linear_blocks import fetch_ahead

TILE = 16 * 64  # bytes of 16 tokens, 32 k each; of their sums; of 32 k of 16 rows of weights
TOKENS, MORE_TOKENS, WEIGHTS = 4, 5, 6  # registers; 0 to 3 are sums


@inlined
def begin_bf16(rows):
    tokens, weights = (min(rows, 16), 64), (16, 64)
    begin_matrices((tokens, tokens, tokens, tokens, tokens, tokens, weights, UNUSED))


@inlined
def bf16_matrix_block(w, groups, n, x, acc):
    """acc[m][16] = w . x[m] for n tokens, and for those that would fill the last tile. x: [K/32][n][32]."""
    for m in range(0, n, 64):
        tiles = (min(64, n - m) + 15) // 16
        at, sums = x + m * 64, acc + m * 64
        if tiles > 2:
            four_tiles(w, groups, n, at, sums)
        elif tiles == 2:
            two_tiles(w, groups, n, at, sums)
        else:
            one_tile(w, groups, n, at, sums)


@inlined
def four_tiles(w, groups, n, x, sums):
    clear_matrix(0)
    clear_matrix(1)
    clear_matrix(2)
    clear_matrix(3)
    for g in range(groups):
        fetch_ahead(w, g, n, TILE)
        at = x + g * n * 64
        load_matrix(WEIGHTS, w + g * TILE, 64)
        load_matrix(TOKENS, at, 64)
        add_bf16_products(0, TOKENS, WEIGHTS)
        load_matrix(MORE_TOKENS, at + TILE, 64)
        add_bf16_products(1, MORE_TOKENS, WEIGHTS)
        load_matrix(TOKENS, at + 2 * TILE, 64)
        add_bf16_products(2, TOKENS, WEIGHTS)
        load_matrix(MORE_TOKENS, at + 3 * TILE, 64)
        add_bf16_products(3, MORE_TOKENS, WEIGHTS)
    store_matrix(0, sums, 64)
    store_matrix(1, sums + TILE, 64)
    store_matrix(2, sums + 2 * TILE, 64)
    store_matrix(3, sums + 3 * TILE, 64)


@inlined
def two_tiles(w, groups, n, x, sums):
    clear_matrix(0)
    clear_matrix(1)
    for g in range(groups):
        fetch_ahead(w, g, n, TILE)
        load_matrix(WEIGHTS, w + g * TILE, 64)
        load_matrix(TOKENS, x + g * n * 64, 64)
        add_bf16_products(0, TOKENS, WEIGHTS)
        load_matrix(MORE_TOKENS, x + g * n * 64 + TILE, 64)
        add_bf16_products(1, MORE_TOKENS, WEIGHTS)
    store_matrix(0, sums, 64)
    store_matrix(1, sums + TILE, 64)


@inlined
def one_tile(w, groups, n, x, sums):
    clear_matrix(0)
    for g in range(groups):
        fetch_ahead(w, g, n, TILE)
        load_matrix(WEIGHTS, w + g * TILE, 64)
        load_matrix(TOKENS, x + g * n * 64, 64)
        add_bf16_products(0, TOKENS, WEIGHTS)
    store_matrix(0, sums, 64)
