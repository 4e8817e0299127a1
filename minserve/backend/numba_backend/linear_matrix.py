"""One block of 16 rows of packed weights against many tokens, in the processor's matrix unit (amx.py).

Owns the order of work: some groups of weights are unpacked into a panel, then 16 tokens at a time pass it, their sums
in registers. The products of the next group are asked for before those of one are scaled, and meanwhile the weights of
the next panel are fetched: fetched while others are unpacked, they would come too late. The arithmetic is that of
linear_groups.py to the last bit: the same integers, scaled in the same order.

It must not know formats: `GROUP`, of unpack.py, gives a group's weights; nor when this unit is chosen (linear_unit.py).
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
    UNUSED,
    add_products,
    begin_matrices,
    clear_matrix,
    load_matrix,
    store_matrix,
)
from minserve.backend.numba_backend.jit import bound, inlined
from minserve.backend.numba_backend.layout import AS_INT8, AS_INT12, AS_INT16
from minserve.backend.numba_backend.linear_blocks import FORMS, fetch_ahead, parts
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


def plus_affine_entry(shape, sums, products, entry, tokens, i):
    _, d, s, _, _ = tokens
    scale, minimum = load_f32(entry, 0), load_f32(entry, 16)
    return plus_affine(sums, SUM(shape, products), scale, minimum, d + i * 4, s + i * 4)


def symmetric_entry(w, g, entry):
    v, scale = GROUP(w, g)
    keep(OPERAND_OF(v), scale, entry)


def plus_symmetric_entry(shape, sums, products, entry, tokens, i):
    _, d, _, p, _ = tokens
    signed = tile_bias(SUM(shape, products), p, i, SHIFT)
    return plus_scaled(sums, signed, load_f32(entry, 0), d + i * 4)


def tile_of_groups(shape, entry, count, n, tokens, acc, w):
    products, next_ones, q = room(ROOM), room(ROOM), tokens[0]
    MULTIPLY(shape, entry + OPERAND, q, MODE, products)
    sums = tile_load_f32(shape, acc)
    for g in range(count):
        i = g * n
        if w:
            fetch_ahead(w, g, n, NBYTES)
        MULTIPLY(shape, entry + ENTRY + OPERAND, q + (i + n) * MODE, MODE, next_ones)
        sums = PLUS(shape, sums, products, entry, tokens, i)
        products, next_ones = next_ones, products
        entry += ENTRY
    tile_store(sums, acc, 0, 16)


def halves_entry(w, g, entry):
    v, scale, v2, scale2 = GROUP(w, g)
    keep(v, scale, entry)
    keep(v2, scale2, entry + ENTRY)


def tile_of_halves(shape, entry, count, n, tokens, acc, w):
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


KINDS: dict[str, tuple[int, Any, Any, Any]] = {  # entries of a group, how they are made, met by a tile, and added up
    "affine": (1, affine_entry, tile_of_groups, plus_affine_entry),
    "symmetric": (1, symmetric_entry, tile_of_groups, plus_symmetric_entry),
    "halves": (2, halves_entry, tile_of_halves, None),
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


def begin_integers(rows):
    """Before the blocks of a kernel. BYTES: of a token that a product takes."""
    if rows >= MANY:
        weights = BYTES // 4, 64
        begin_matrices(((16, 64), (16, BYTES), (8, 64), (8, BYTES), weights, UNUSED, UNUSED, UNUSED))


def matrix_block(form: str, mode: int) -> tuple[Any, Any]:
    """(begin, block) for weights of a format and activations of a mode, MANY tokens or more."""
    kind, bindings = FORMS[form]
    each, unpack, tile, plus = KINDS[kind]
    bindings = bindings | BY_MODE[mode] | {"MODE": mode, "COUNT": ENTRIES // each}
    if plus is not None:
        bindings["PLUS"] = bound(plus, **bindings)
    nbytes = 16 if kind == "halves" else AS_INT12 if mode == AS_INT12 else 32
    begin = bound(begin_integers, BYTES=nbytes)
    return begin, bound(block, UNPACK=bound(unpack, **bindings), PASS=bound(tile, **bindings), **bindings)
