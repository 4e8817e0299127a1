"""Linear layers: 16 rows of packed weights at a time meet the tokens of a tile.

out[m, n] = sum over k of w[n, k] x[m, k], then bias, residual, or gate and up to act(gate) * up. One source serves 1 to
512 tokens: the sums of a tile (64 tokens x 16 rows) stay in the L1 cache. Beside vectors a group of weights stays in
registers while a tile goes by; where weights become operands of a matrix unit first, many tiles follow each other. A
token's result does not depend on which tokens stand beside it.

Owns the kernel: which rows a thread computes, where, and what becomes of their sums. It must not know formats
(linear_blocks.py), the arithmetic (linear_groups.py) or which unit of the processor does it (linear_unit.py).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, name-defined"
# ruff: noqa: F821  (names in capitals are bound by `variant`)

from __future__ import annotations

from minserve.backend.numba_backend.dot import align_stack
from minserve.backend.numba_backend.jit import Kernel, inlined, variant
from minserve.backend.numba_backend.layout import (
    AS_BF16,
    AS_FLOATS,
    AS_INT8,
    AS_INT12,
    AS_INT16,
    GROUP,
    TILE,
    row_bytes,
)
from minserve.backend.numba_backend.linear_blocks import FORMS
from minserve.backend.numba_backend.linear_unit import end, modes, prompt_mode, unit
from minserve.backend.numba_backend.mathlib import activate, share
from minserve.backend.numba_backend.packing import ROWS
from minserve.backend.numba_backend.quantize import quantize_group
from minserve.backend.numba_backend.simd_memory import i64, load_f32, store_bf16, store_f32

NAMES = {AS_BF16: "bf16", AS_INT8: "int8", AS_INT12: "int12", AS_INT16: "int16"}
SUMS = 4 * TILE * 64  # bytes of the sums of a tile and up to four row blocks; operands, if any, lie behind them
TOKENS_ROOM = 1 << 20  # bytes of tokens in bfloat16: of an L2 cache of 2 MB they leave the other half alone
FIELDS = (
    "out x mode weights block_bytes blocks units unit cols stride kind out_mode halves bias residual scratch"
    " scratch_stride own own_stride first"
)


def linear(tid, threads, rows, p):
    """out[:, 16 b : 16 b + 16] for this thread's row blocks b, its share of `units` equal parts of `unit` blocks.

    x: activations, or this thread's own copy of one row. first: 0, or the address of the number of rows of out and
    residual that come before these. How many tokens and row blocks go together is up to what is bound here.

    kind 0: out = sum + bias + residual (either may be 0). kind 1, 2: row blocks alternate between gate and up, and
    out = act(gate) * up; with a mode for the output, it is rounded for the next layer: with integers, 2 x 2 row blocks
    make a group.
    """
    align_stack()
    out, x, mode, w, block_bytes = i64(p, 0), i64(p, 1), i64(p, 2), i64(p, 3), i64(p, 4)
    blocks, units, unit, cols, stride, kind = i64(p, 5), i64(p, 6), i64(p, 7), i64(p, 8), i64(p, 9), i64(p, 10)
    out_mode, halves, bias, residual = i64(p, 11), i64(p, 12), i64(p, 13), i64(p, 14)
    acc = i64(p, 15) + tid * i64(p, 16)
    if rows == 1 and i64(p, 17):
        x = i64(p, 17) + tid * i64(p, 18)
    if i64(p, 19) and out_mode == AS_FLOATS:
        before = i64(i64(p, 19), 0) * stride * 4
        out, residual = out + before, residual + before if residual else 0
    u0, u1 = share(units, tid, threads)
    b0 = blocks if u0 == units else u0 * unit
    b1 = blocks if u1 == units else u1 * unit  # padding belongs to the last unit
    BEGIN(rows)
    each = 1 if kind == 0 else 2 if out_mode <= AS_BF16 else 4  # row blocks of what is counted in blocks
    height = max(TILE, min(MOST, TOKENS_ROOM // (2 * cols) // TILE * TILE))
    for first in range(0, rows, height):
        for b in range(b0, b1, TOGETHER if kind == 0 else 1):
            count = min(TOGETHER, b1 - b) if kind == 0 else each
            operands = PREPARE(w + b * each * block_bytes, block_bytes, count, cols // GROUP, acc + SUMS)
            for m in range(first, min(first + height, rows), TILE):
                n = min(TILE, rows - m)
                tile = x + m * row_bytes(cols, mode)
                MULTIPLY(operands, block_bytes, count, cols // GROUP, n, tile, acc, m == first)
                if kind == 0:
                    for i in range(count):
                        finish(out, m * stride + (b + i) * 16, stride, n, acc + i * TILE * 64, bias, residual, b + i)
                elif out_mode == AS_FLOATS:
                    finish_glu(kind, out, m * stride + b * 16, stride, n, acc, bias, b)
                elif out_mode == AS_BF16:
                    finish_bf16(kind, out + m * row_bytes(stride, AS_BF16), n, acc, bias, b)
                else:
                    at = out + m * row_bytes(stride, out_mode)
                    finish_quantized(kind, at, stride, n, acc, bias, b, out_mode, halves)
    end()


@inlined
def finish(out, i, stride, n, acc, bias, residual, b):
    for m in range(n):
        v = load_f32(acc, m * 16)
        if bias:
            v = v + load_f32(bias, b * 16)
        if residual:
            v = v + load_f32(residual, i + m * stride)
        store_f32(out, i + m * stride, v)


@inlined
def gated(kind, acc, m, bias, i):
    """act(gate) * up of token m; bias 0: none, else its row blocks from i on."""
    gate, up = load_f32(acc, m * 16), load_f32(acc, (TILE + m) * 16)
    if bias:
        gate, up = gate + load_f32(bias, i), up + load_f32(bias, i + 16)
    return activate(kind, gate) * up


@inlined
def finish_glu(kind, out, i, stride, n, acc, bias, b):
    for m in range(n):
        store_f32(out, i + m * stride, gated(kind, acc, m, bias, b * 32))


@inlined
def finish_bf16(kind, tile, n, acc, bias, b):
    """Half a group of each token."""
    for m in range(n):
        store_bf16(tile + (b // 2 * n + m) * 2 * GROUP, b % 2 * 16, gated(kind, acc, m, bias, b * 32))


@inlined
def finish_quantized(kind, tile, cols, n, acc, bias, g, mode, halves):
    for m in range(n):
        low, high = gated(kind, acc, m, bias, g * 64), gated(kind, acc + 2 * TILE * 64, m, bias, g * 64 + 32)
        quantize_group(low, high, tile, n, m, g, cols // GROUP, mode, halves)


def scratch_bytes(form: str, mode: int, cols: int) -> int:
    """Of a thread: sums, and as many blocks of weights as go together, where they become operands first."""
    return SUMS + (4 * ROWS * cols * 2 if mode == AS_BF16 and form != "bf16" else 0)


def _modes(form: str) -> set[int]:
    return {*modes(form), prompt_mode(form, accurate=False)}


def _kernel(form: str, mode: int) -> Kernel:
    name = f"linear_{form}" if form == "bf16" else f"linear_{form}_{NAMES[mode]}"
    return variant(linear, FIELDS, name, **unit(form, mode))


LINEAR = {(form, mode): _kernel(form, mode) for form in (*FORMS, "bf16") for mode in _modes(form)}
"""Kernels by format and mode of the activations."""
