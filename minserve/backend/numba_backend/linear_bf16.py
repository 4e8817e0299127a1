"""Two blocks of 16 rows of weights against many tokens, in the processor's matrix unit (amx.py), in bfloat16.

Owns the order of work: 32 tokens at a time pass both blocks, their sums in four registers. Weights in bfloat16 are
operands as they lie; integers become operands first, scale * q + minimum, rounded, so that no product needs scaling.
Sums are float32, in the unit's own order, the same for one token as for many; so these kernels serve every token of
their kind. It must not know who chooses them (linear_unit.py).
Functions with names in capitals are templates for `bound`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, name-defined"
# ruff: noqa: F821  (names in capitals are bound by `bound`)

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from minserve.backend.numba_backend.amx import (
    add_bf16_products,
    begin_matrices,
    clear_matrix,
    load_matrix,
    store_matrix,
)
from minserve.backend.numba_backend.jit import bound, inlined
from minserve.backend.numba_backend.layout import TILE
from minserve.backend.numba_backend.linear_blocks import FORMS, fetch_ahead
from minserve.backend.numba_backend.mathlib import F
from minserve.backend.numba_backend.simd_math import splat
from minserve.backend.numba_backend.simd_types import I8, I32, I64, call, constant, f32x16, i32x16, i64t, store
from minserve.backend.numba_backend.tile import vectors

OPERAND = 16 * 64  # bytes of a tile: 32 k of 16 rows of weights, or of 16 tokens; and of 16 tokens' sums
SUMS = TILE * 64  # bytes of a block's sums
TOKENS, MORE_TOKENS, WEIGHTS, MORE_WEIGHTS = 4, 5, 6, 7  # registers; 0 to 3 are sums

# -- 32 k of 16 rows of integers as an operand [k/2][16 rows][2 k]


def _rounded(b, number):
    """float32 -> bfloat16 in the upper half of each lane, the lower half undefined."""
    return b.add(b.bitcast(number, i32x16.ir), constant(I32, 16, 0x8000))


@intrinsic
def store_operand(context, weights, scale, minimum, out):
    """bfloat16(scale * w + minimum): weights are vectors of 4 k of 16 rows, each of which gives two of 2 k."""

    def generate(context, b, sig, args):
        weights, scale, minimum, out = args
        for j, v in enumerate(vectors(b, sig.args[0], weights)):
            fours = b.bitcast(v, i32x16.ir)
            pair = []
            for k in range(4):
                byte = b.and_(b.lshr(fours, constant(I32, 16, 8 * k)), constant(I32, 16, 255))
                number = call(b, "llvm.fma.v16f32", f32x16.ir, b.sitofp(byte, f32x16.ir), scale, minimum)
                pair.append(_rounded(b, number))
            for half in range(2):
                low = b.lshr(pair[2 * half], constant(I32, 16, 16))
                high = b.and_(pair[2 * half + 1], constant(I32, 16, -65536))
                store(b, b.or_(low, high), out, ir.Constant(I64, (2 * j + half) * 64), I8)
        return context.get_dummy_value()

    return types.void(weights, f32x16, f32x16, i64t), generate


def affine_operand(w, g, out):
    v, scale, minimum = GROUP(w, g)
    store_operand(v[:8], scale, minimum, out)


def symmetric_operand(w, g, out):
    v, scale = GROUP(w, g)
    store_operand(v[:8], scale, scale * splat(F(-(1 << SHIFT))), out)


def halves_operand(w, g, out):
    v, scale, v2, scale2 = GROUP(w, g)
    store_operand(v, scale, scale * splat(F(-(1 << SHIFT))), out)
    store_operand(v2, scale2, scale2 * splat(F(-(1 << SHIFT))), out + OPERAND // 2)


KINDS = {"affine": affine_operand, "symmetric": symmetric_operand, "halves": halves_operand}

# -- blocks as operands [count][groups]


def made(w, nbytes, count, groups, room):
    for i in range(count):
        for g in range(groups):
            fetch_ahead(w + i * nbytes, g, TILE, NBYTES)
            UNPACK(w + i * nbytes, g, room + (i * groups + g) * OPERAND)
    return room


@inlined
def as_they_lie(w, nbytes, count, groups, room):
    return w


# -- 16 or 32 tokens x [groups][stride bytes] pass operands a and b: sums of a, then, SUMS bytes on, of b


@inlined
def one_tile(a, b, groups, x, stride, sums, fetch):
    clear_matrix(0)
    clear_matrix(1)
    for g in range(groups):
        if fetch:
            fetch_ahead(a, g, TILE, OPERAND)
            fetch_ahead(b, g, TILE, OPERAND)
        load_matrix(TOKENS, x + g * stride, 64)
        load_matrix(WEIGHTS, a + g * OPERAND, 64)
        add_bf16_products(0, TOKENS, WEIGHTS)
        load_matrix(MORE_WEIGHTS, b + g * OPERAND, 64)
        add_bf16_products(1, TOKENS, MORE_WEIGHTS)
    store_matrix(0, sums, 64)
    store_matrix(1, sums + SUMS, 64)


@inlined
def two_tiles(a, b, groups, x, stride, sums, fetch):
    clear_matrix(0)
    clear_matrix(1)
    clear_matrix(2)
    clear_matrix(3)
    for g in range(groups):
        if fetch:
            fetch_ahead(a, g, TILE, OPERAND)
            fetch_ahead(b, g, TILE, OPERAND)
        load_matrix(TOKENS, x + g * stride, 64)
        load_matrix(WEIGHTS, a + g * OPERAND, 64)
        add_bf16_products(0, TOKENS, WEIGHTS)
        load_matrix(MORE_WEIGHTS, b + g * OPERAND, 64)
        add_bf16_products(1, TOKENS, MORE_WEIGHTS)
        load_matrix(MORE_TOKENS, x + g * stride + OPERAND, 64)
        add_bf16_products(2, MORE_TOKENS, WEIGHTS)
        add_bf16_products(3, MORE_TOKENS, MORE_WEIGHTS)
    store_matrix(0, sums, 64)
    store_matrix(1, sums + SUMS, 64)
    store_matrix(2, sums + OPERAND, 64)
    store_matrix(3, sums + OPERAND + SUMS, 64)


def pairs(w, nbytes, count, groups, n, x, acc, first):
    """acc[i][m][16] = block i . token m, for `count` blocks, and for tokens that would fill the last tile of 16.

    A block without a second one is its own, so acc has room for an even number. first: no tokens met these weights yet.
    """
    for i in range(0, count, 2):
        a = w + i * groups * OPERAND
        b = a + groups * OPERAND if i + 1 < count else a
        for m in range(0, n, 32):
            at, sums = x + m * 64, acc + i * SUMS + m * 64
            if n - m > 16:
                two_tiles(a, b, groups, at, n * 64, sums, FETCH and first and m == 0)
            else:
                one_tile(a, b, groups, at, n * 64, sums, FETCH and first and m == 0)


@inlined
def begin_bf16(rows):
    tokens, weights = (min(rows, 16), 64), (16, 64)
    begin_matrices((tokens, tokens, tokens, tokens, tokens, tokens, weights, weights))


def bf16_unit(form: str) -> tuple[Any, Any]:
    """(prepare, multiply) for weights of a format and activations in bfloat16."""
    if form == "bf16":
        return as_they_lie, bound(pairs, FETCH=True)
    kind, bindings = FORMS[form]
    return bound(made, UNPACK=bound(KINDS[kind], **bindings), **bindings), bound(pairs, FETCH=False)
