"""Linear layers: 16 rows of packed weights at a time meet the tokens of a tile.

out[m, n] = sum over k of w[n, k] x[m, k], then bias, residual, or gate and up to act(gate) * up. One source serves 1 to
512 tokens: the vectors of a group of weights stay in registers while the tokens go by, and the sums of a tile (64
tokens x 16 rows) stay in the L1 cache. A token's result does not depend on which tokens stand beside it.

Owns the kernel: which rows a thread computes, where, and what becomes of their sums. It must not know formats
(linear_blocks.py) or the arithmetic (linear_groups.py, linear_matrix.py).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, name-defined"

from __future__ import annotations

from minserve.backend.numba_backend.dot import align_stack
from minserve.backend.numba_backend.jit import Kernel, inlined, variant
from minserve.backend.numba_backend.layout import AS_BF16, AS_INT8, AS_INT12, AS_INT16, GROUP, TILE, row_bytes
from minserve.backend.numba_backend.linear_blocks import FORMS
from minserve.backend.numba_backend.linear_groups import DOTS_BY_MODE
from minserve.backend.numba_backend.linear_matrix import end, unit
from minserve.backend.numba_backend.mathlib import F, activate, share
from minserve.backend.numba_backend.quantize import quantize_group
from minserve.backend.numba_backend.simd_math import splat
from minserve.backend.numba_backend.simd_memory import i64, load_f32, store_f32


@inlined
def linear(tid, threads, rows, p, begin, block):
    """out[:, 16 b : 16 b + 16] for this thread's row blocks b, its share of `units` equal parts of `unit` blocks.

    x: activations, or this thread's own copy of one row. block: what multiplies 16 rows of weights with a tile of
    tokens; begin: what comes before.

    kind 0: out = sum + bias + residual (either may be 0). kind 1, 2: row blocks alternate between gate and up, and
    out = act(gate) * up; with a mode for the output, it is rounded for the next layer: 2 x 2 row blocks make a group.
    """
    align_stack()
    out, x, mode, w, block_bytes = i64(p, 0), i64(p, 1), i64(p, 2), i64(p, 3), i64(p, 4)
    blocks, units, unit, cols, stride, kind = i64(p, 5), i64(p, 6), i64(p, 7), i64(p, 8), i64(p, 9), i64(p, 10)
    out_mode, halves, bias, residual = i64(p, 11), i64(p, 12), i64(p, 13), i64(p, 14)
    acc = i64(p, 15) + tid * i64(p, 16)
    if rows == 1 and i64(p, 17):
        x = i64(p, 17) + tid * i64(p, 18)
    u0, u1 = share(units, tid, threads)
    b0 = blocks if u0 == units else u0 * unit
    b1 = blocks if u1 == units else u1 * unit  # padding belongs to the last unit
    begin(rows)
    together = 1 if kind == 0 else (2 if out_mode == 0 else 4)
    for m0 in range(0, rows, TILE):
        n = min(TILE, rows - m0)
        tile = x + m0 * row_bytes(cols, mode)
        for b in range(b0, b1):
            for i in range(together):
                sums = acc + i * (TILE * 64)
                for m in range(n):
                    store_f32(sums, m * 16, splat(F(0)))
                block(w + (b * together + i) * block_bytes, cols // GROUP, n, tile, sums)
            if kind == 0:
                finish(out, m0 * stride + b * 16, stride, n, acc, bias, residual, b)
            elif out_mode == 0:
                finish_glu(kind, out, m0 * stride + b * 16, stride, n, acc, bias, b)
            else:
                finish_quantized(
                    kind, out + m0 * row_bytes(stride, out_mode), stride, n, acc, bias, b, out_mode, halves
                )
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
def finish_quantized(kind, tile, cols, n, acc, bias, g, mode, halves):
    for m in range(n):
        low, high = gated(kind, acc, m, bias, g * 64), gated(kind, acc + 2 * TILE * 64, m, bias, g * 64 + 32)
        quantize_group(low, high, tile, n, m, g, cols // GROUP, mode, halves)


FIELDS = (
    "out x mode weights block_bytes blocks units unit cols stride kind out_mode halves bias residual scratch"
    " scratch_stride own own_stride"
)


def _linear(tid, threads, rows, p):
    linear(tid, threads, rows, p, BEGIN, BLOCK)  # noqa: F821  (bound by variant)


def modes(form: str) -> tuple[int, int]:
    """The fast and the accurate mode of activations for weights of a format."""
    if form == "bf16":
        return AS_BF16, AS_BF16
    return AS_INT8, AS_INT12 if form.startswith("q4") else AS_INT16


def _kernel(form: str, mode: int) -> Kernel:
    begin, block = unit(form, mode)
    name = f"linear_{form}" if mode == AS_BF16 else f"linear_{form}_{DOTS_BY_MODE[mode][0]}"
    return variant(_linear, FIELDS, name, BEGIN=begin, BLOCK=block)


LINEAR = {(form, mode): _kernel(form, mode) for form in (*FORMS, "bf16") for mode in modes(form)}
"""Kernels by format and mode of the activations."""
