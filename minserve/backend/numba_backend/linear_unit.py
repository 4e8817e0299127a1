"""Which unit of the processor multiplies row blocks of weights with tiles of tokens.

Owns this choice, by what the processor has, the weights' format, the mode of the activations and the number of tokens,
and what a kernel needs to know of it. It must not know the arithmetic (linear_blocks.py, linear_matrix.py,
linear_bf16.py) or what becomes of the sums (linear.py). Functions with names in capitals are templates for `bound`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, name-defined"
# ruff: noqa: F821  (names in capitals are bound by `bound`)

from __future__ import annotations

from typing import Any

from minserve.backend.numba_backend.amx import HAS_AMX, end_matrices
from minserve.backend.numba_backend.jit import bound, inlined
from minserve.backend.numba_backend.layout import AS_BF16, AS_INT8, AS_INT12, AS_INT16, STRIPE, TILE
from minserve.backend.numba_backend.linear_bf16 import begin_bf16, bf16_unit
from minserve.backend.numba_backend.linear_blocks import bf16_block, vector_block
from minserve.backend.numba_backend.linear_matrix import MANY, matrix_block
from minserve.backend.numba_backend.mathlib import F
from minserve.backend.numba_backend.simd_math import splat
from minserve.backend.numba_backend.simd_memory import store_f32


def modes(form: str) -> tuple[int, int]:
    """The fast and the accurate mode of activations for weights of a format."""
    if form == "bf16":
        return AS_BF16, AS_BF16
    return AS_INT8, AS_INT12 if form.startswith("q4") else AS_INT16


def prompt_mode(form: str, *, accurate: bool) -> int:
    """The mode for the tokens of a prompt. Where a matrix unit multiplies bfloat16, that is faster than 8 bits, which
    it has to scale in between, and more accurate."""
    return AS_BF16 if HAS_AMX and not accurate else modes(form)[accurate]


@inlined
def no_unit(rows):
    pass


@inlined
def end():
    """After the blocks of a kernel."""
    if HAS_AMX:
        end_matrices()


def either_block(w, groups, n, x, acc):
    if n >= MANY:
        MATRIX(w, groups, n, x, acc)
    else:
        VECTORS(w, groups, n, x, acc)


@inlined
def as_they_lie(w, nbytes, count, groups, room):
    return w


def one_by_one(w, nbytes, count, groups, n, x, acc, _):
    """acc[i][m][16] = block i . token m, for `count` blocks of nbytes."""
    for i in range(count):
        sums = acc + i * TILE * 64
        for m in range(n):
            store_f32(sums, m * 16, splat(F(0)))
        BLOCK(w + i * nbytes, groups, n, x, sums)


def unit(form: str, mode: int) -> dict[str, Any]:
    """What multiplies weights of a format with activations of a mode: BEGIN(rows), PREPARE(...) row blocks, TOGETHER at
    least where there are as many, and MULTIPLY(...) them with tiles of tokens, up to MOST tokens in a row."""
    if mode == AS_BF16 and HAS_AMX:
        prepare, multiply = bf16_unit(form)
        return {"BEGIN": begin_bf16, "PREPARE": prepare, "MULTIPLY": multiply, "MOST": STRIPE, "TOGETHER": 2}
    begin, one = no_unit, bf16_block if mode == AS_BF16 else vector_block(form, mode)
    if HAS_AMX:
        begin, many = matrix_block(form, mode)
        one = bound(either_block, MATRIX=many, VECTORS=one)
    multiply = bound(one_by_one, BLOCK=one)
    return {"BEGIN": begin, "PREPARE": as_they_lie, "MULTIPLY": multiply, "MOST": TILE, "TOGETHER": 1}
