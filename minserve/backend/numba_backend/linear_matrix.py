"""One block of 16 rows of packed weights against many tokens, in the processor's matrix unit (amx.py).

Owns the order of work: some groups of weights are unpacked into a panel, then 16 tokens at a time pass it, their sums
in registers. The products of the next group are asked for before those of one are scaled. The arithmetic is that of
linear_groups.py to the last bit: the same integers, scaled in the same order.

Owns too which unit a kernel uses (`unit`). It must not know formats: `GROUP`, of unpack.py, gives a group's weights.
Functions with names in capitals are templates for `bound`.

Panel: entries of [scale, minimum: 16 floats each][weights as an operand: up to 12 vectors], one a group, or two where
groups have 16 weights. Three bytes for two integers (linear_groups.py) need no third product here: the unit adds up as
many bytes as there are, so that beside weights (16 low, high, w) it makes 16 (low u) + high v + w s in one go.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, name-defined"
# ruff: noqa: F821  (names in capitals are bound by `bound`)

from __future__ import annotations

from typing import Any

from minserve.backend.numba_backend.amx import (
    HAS_AMX,
    UNUSED,
    add_products,
    begin_matrices,
    clear_matrix,
    end_matrices,
    load_matrix,
    store_matrix,
)
from minserve.backend.numba_backend.jit import bound, inlined
from minserve.backend.numba_backend.layout import AS_BF16, AS_INT8, AS_INT12, AS_INT16, STRIPE, TILE
from minserve.backend.numba_backend.linear_bf16 import begin_bf16, bf16_unit
from minserve.backend.numba_backend.linear_blocks import FORMS, bf16_block, fetch_ahead, parts, vector_block
from minserve.backend.numba_backend.mathlib import F
from minserve.backend.numba_backend.simd_math import splat
from minserve.backend.numba_backend.simd_memory import load_f32, store_f32
from minserve.backend.numba_backend.simd_types import room
from minserve.backend.numba_backend.tile import (
    plus_affine,
    plus_scaled,
    store_all,
    tile_bias,
    tile_load_f32,
    tile_load_i32,
    tile_shift,
    tile_store,
    tile_sum,
    tile_unbias,
    zeros_i32,
)
from minserve.backend.numba_backend.unpack import times_16

MANY = 12  # tokens from which on the matrix unit is worth its while beside weights of integers
ENTRIES = 24  # of a panel: 21 KB, which the L1 cache holds beside the tokens
OPERAND = 2 * 64  # bytes of an entry before its weights
ENTRY = OPERAND + 12 * 64
PANEL = (ENTRIES + 1) * ENTRY  # the last entry is followed by one whose products nobody reads
PRODUCTS = 16 * 64  # bytes of a tile of products
ROOM = 2 * PRODUCTS
SUMS, TOKENS, FEW_SUMS, FEW_TOKENS, WEIGHTS = 0, 1, 2, 3, 4  # registers

# -- by mode: weights as an operand, the products of an entry, their sums


@inlined
def all_weights(v):
    return v[:8]


@inlined
def low_raised(v):
    return (times_16(v[0]), times_16(v[1]), times_16(v[2]), times_16(v[3])) + v[4:]  # noqa: RUF005


@inlined
def multiply(shape, weights, tokens, stride, out):
    """out [R][16] int32 = tokens [R][bytes of an entry] . weights, R the length of `shape`: 16 or 8."""
    load_matrix(WEIGHTS, weights, 64)
    if len(shape) == 16:
        clear_matrix(SUMS)
        load_matrix(TOKENS, tokens, stride)
        add_products(SUMS, TOKENS, WEIGHTS)
        store_matrix(SUMS, out, 64)
    else:
        clear_matrix(FEW_SUMS)
        load_matrix(FEW_TOKENS, tokens, stride)
        add_products(FEW_SUMS, FEW_TOKENS, WEIGHTS)
        store_matrix(FEW_SUMS, out, 64)


@inlined
def multiply_both(shape, weights, tokens, stride, out):
    multiply(shape, weights, tokens, stride, out)
    multiply(shape, weights, tokens + 32, stride, out + PRODUCTS)


@inlined
def one_sum(shape, products):
    return tile_load_i32(shape, products)


@inlined
def sum_of_both(shape, products):
    return tile_sum(tile_shift(tile_load_i32(shape, products), 8), tile_load_i32(shape, products + PRODUCTS))


BY_MODE: dict[int, dict[str, Any]] = {
    AS_INT8: {"OPERAND_OF": all_weights, "MULTIPLY": multiply, "SUM": one_sum},
    AS_INT12: {"OPERAND_OF": low_raised, "MULTIPLY": multiply, "SUM": one_sum},
    AS_INT16: {"OPERAND_OF": all_weights, "MULTIPLY": multiply_both, "SUM": sum_of_both},
}

# -- by kind of format: group g becomes one or two entries; a tile of tokens passes `count` groups: acc[r] += ...
#    tokens: addresses of the q, d, s, p and half p (layout.py) of the first token in the first group, n tokens before
#    those of the next.


@inlined
def keep(weights, scale, entry):
    store_f32(entry, 0, scale)
    store_all(weights, entry + OPERAND)


def affine_entry(w, g, entry):
    v, scale, minimum = GROUP(w, g)
    keep(OPERAND_OF(v), scale, entry)
    store_f32(entry, 16, minimum)


def affine_tile(shape, entry, count, n, tokens, acc, w):
    q, d, s, _, _ = tokens
    products, next_ones = room(ROOM), room(ROOM)
    MULTIPLY(shape, entry + OPERAND, q, MODE, products)
    sums = tile_load_f32(shape, acc)
    for g in range(count):
        i = g * n
        if w:
            fetch_ahead(w, g, n, NBYTES)
        MULTIPLY(shape, entry + ENTRY + OPERAND, q + (i + n) * MODE, MODE, next_ones)
        scale, minimum = load_f32(entry, 0), load_f32(entry, 16)
        sums = plus_affine(sums, SUM(shape, products), scale, minimum, d + i * 4, s + i * 4)
        products, next_ones = next_ones, products
        entry += ENTRY
    tile_store(sums, acc, 0, 16)


def symmetric_entry(w, g, entry):
    v, scale = GROUP(w, g)
    keep(OPERAND_OF(v), scale, entry)


def symmetric_tile(shape, entry, count, n, tokens, acc, w):
    q, d, _, p, _ = tokens
    products, next_ones = room(ROOM), room(ROOM)
    MULTIPLY(shape, entry + OPERAND, q, MODE, products)
    sums = tile_load_f32(shape, acc)
    for g in range(count):
        i = g * n
        if w:
            fetch_ahead(w, g, n, NBYTES)
        MULTIPLY(shape, entry + ENTRY + OPERAND, q + (i + n) * MODE, MODE, next_ones)
        signed = tile_bias(SUM(shape, products), p, i, SHIFT)
        sums = plus_scaled(sums, signed, load_f32(entry, 0), d + i * 4)
        products, next_ones = next_ones, products
        entry += ENTRY
    tile_store(sums, acc, 0, 16)


def halves_entry(w, g, entry):
    v, scale, v2, scale2 = GROUP(w, g)
    keep(v, scale, entry)
    keep(v2, scale2, entry + ENTRY)


def halves_tile(shape, entry, count, n, tokens, acc, w):
    q, d, _, p, half = tokens
    first, second = room(ROOM), room(ROOM)
    MULTIPLY(shape, entry + OPERAND, q, MODE, first)
    sums = tile_load_f32(shape, acc)
    for g in range(count):
        i = g * n
        if w:
            fetch_ahead(w, g, n, NBYTES)
        MULTIPLY(shape, entry + ENTRY + OPERAND, q + i * MODE + 16, MODE, second)
        signed = tile_bias(SUM(shape, first), half, i, SHIFT)
        sums = plus_scaled(sums, signed, load_f32(entry, 0), d + i * 4)
        MULTIPLY(shape, entry + 2 * ENTRY + OPERAND, q + (i + n) * MODE, MODE, first)
        signed = tile_unbias(tile_bias(SUM(shape, second), p, i, SHIFT), half, i, SHIFT)
        sums = plus_scaled(sums, signed, load_f32(entry + ENTRY, 0), d + i * 4)
        entry += 2 * ENTRY
    tile_store(sums, acc, 0, 16)


KINDS = {  # entries of a group, how they are made and met
    "affine": (1, affine_entry, affine_tile),
    "symmetric": (1, symmetric_entry, symmetric_tile),
    "halves": (2, halves_entry, halves_tile),
}

# -- the block: acc[m][16] += w . x[m]


def block(w, groups, n, x, acc):
    """n tokens; those up to the next multiple of 8 are computed too, of whatever lies there."""
    panel = room(PANEL)
    q, d, s, p, half = parts(x, groups, MODE, n)
    for first in range(0, groups, COUNT):
        count = min(COUNT, groups - first)
        for g in range(count):
            UNPACK(w, first + g, panel + g * (ENTRIES // COUNT * ENTRY))
        for m in range(0, n, 16):
            i = first * n + m
            tokens = (q + i * MODE, d + i * 4, s + i * 4, p + i * 4, half + i * 4)
            fetched = 0 if m else w + first * NBYTES
            if n - m > 8:
                PASS(zeros_i32(16), panel, count, n, tokens, acc + m * 64, fetched)
            else:
                PASS(zeros_i32(8), panel, count, n, tokens, acc + m * 64, fetched)


# -- which unit does it. begin(rows) comes before the blocks of a kernel, end() after them.


@inlined
def end():
    if HAS_AMX:
        end_matrices()


@inlined
def no_unit(rows):
    pass


def begin_integers(rows):
    if rows >= MANY:
        weights = BYTES // 4, 64
        begin_matrices(((16, 64), (16, BYTES), (8, 64), (8, BYTES), weights, UNUSED, UNUSED, UNUSED))


def either_block(w, groups, n, x, acc):
    if n >= MANY:
        MATRIX(w, groups, n, x, acc)
    else:
        VECTORS(w, groups, n, x, acc)


@inlined
def as_it_lies(w, nbytes, count, groups, room):
    return w


def one_by_one(w, nbytes, count, groups, n, x, acc, _):
    """acc[i][m][16] = block i . token m, for `count` blocks of nbytes."""
    for i in range(count):
        sums = acc + i * TILE * 64
        for m in range(n):
            store_f32(sums, m * 16, splat(F(0)))
        BLOCK(w + i * nbytes, groups, n, x, sums)


def matrix_block(form: str, mode: int) -> Any:
    """The block of the matrix unit for weights of a format and activations of a mode."""
    kind, bindings = FORMS[form]
    each, unpack, tile = KINDS[kind]
    bindings = bindings | BY_MODE[mode] | {"MODE": mode, "COUNT": ENTRIES // each}
    return bound(block, UNPACK=bound(unpack, **bindings), PASS=bound(tile, **bindings), **bindings)


def unit(form: str, mode: int) -> dict[str, Any]:
    """What multiplies weights of a format with activations of a mode, as this processor does it best: begin(rows),
    prepare(...) row blocks, up to TOGETHER, and multiply(...) them with a tile of tokens, up to MOST in a row."""
    if mode == AS_BF16 and HAS_AMX:
        prepare, multiply = bf16_unit(form)
        return {"BEGIN": begin_bf16, "PREPARE": prepare, "MULTIPLY": multiply, "MOST": STRIPE, "TOGETHER": 2}
    begin, one = no_unit, bf16_block if mode == AS_BF16 else vector_block(form, mode)
    if HAS_AMX:
        halves = FORMS[form][0] == "halves"
        nbytes = 16 if halves else AS_INT12 if mode == AS_INT12 else 32  # of a token that a product takes
        begin = bound(begin_integers, BYTES=nbytes)
        one = bound(either_block, MATRIX=matrix_block(form, mode), VECTORS=one)
    multiply = bound(one_by_one, BLOCK=one)
    return {"BEGIN": begin, "PREPARE": as_it_lies, "MULTIPLY": multiply, "MOST": TILE, "TOGETHER": 1}
