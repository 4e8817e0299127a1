"""Dot products: the only operations for which the CPU's features choose the instructions.

`dot_tile` multiplies unsigned bytes (weights) with signed bytes (activations) into int32: vpdpbusd with AVX-512 VNNI,
vpmaddubsw or vpmaddwd with AVX2, plain widening arithmetic elsewhere; the integers are the same everywhere.
`bf16_tile` multiplies pairs of bfloat16 into float32: vdpbf16ps, or two fused multiply-adds elsewhere.

Both go through a tile (tile.py), whose R chains hide the instruction's latency.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, misc"

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba.extending import intrinsic

from minserve.backend.numba_backend.jit import cpu_has
from minserve.backend.numba_backend.simd_types import (
    HAS_BF16,
    I8,
    I16,
    I32,
    I64,
    BFloat,
    call,
    constant,
    f32x16,
    i32x16,
    i64t,
    load,
    splat_value,
    u8x64,
)
from minserve.backend.numba_backend.tile import token_at, vectors

HAS_VNNI = cpu_has("avx512vnni")
HAS_AVX2 = cpu_has("avx2") and not HAS_VNNI


def _accepts(declaration: str) -> bool:
    """Whether this LLVM has an intrinsic with this signature: it changed between versions."""
    try:
        llvm.parse_assembly(f"declare {declaration}").verify()
    except RuntimeError:
        return False
    return True


_BYTES = (
    "<64 x i8>"
    if _accepts("<16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <64 x i8>, <64 x i8>)")
    else "<16 x i32>"
)
_VNNI_OPERAND = u8x64.ir if _BYTES == "<64 x i8>" else i32x16.ir


def _dpbusd(b, acc, weights, x):
    """acc[r] += sum of 4 weight bytes of row r (unsigned) times the 4 signed bytes of x, the same for every row."""
    x = splat_value(b, x, 16)
    if HAS_VNNI:
        args = (acc, b.bitcast(weights, _VNNI_OPERAND), b.bitcast(x, _VNNI_OPERAND))
        return call(b, "llvm.x86.avx512.vpdpbusd.512", i32x16.ir, *args)
    # Even and odd bytes as int16, multiplied and added in pairs: LLVM makes vpmaddwd of it where there is one.
    short, wide, eight = ir.VectorType(I16, 32), ir.VectorType(I32, 32), constant(I16, 32, 8)
    w, x = b.bitcast(weights, short), b.bitcast(x, short)
    halves = ((b.and_(w, constant(I16, 32, 255)), b.ashr(b.shl(x, eight), eight)), (b.lshr(w, eight), b.ashr(x, eight)))
    for wh, xh in halves:
        product = b.mul(b.sext(wh, wide), b.sext(xh, wide))
        pairs = [
            b.shuffle_vector(product, product, ir.Constant(ir.VectorType(I32, 16), list(range(first, 32, 2))))
            for first in (0, 1)
        ]
        acc = b.add(acc, b.add(*pairs))
    return acc


def _dpbf16(b, acc, weights, x):
    """acc[r] += w[r][0] * x[0] + w[r][1] * x[1] for pairs of bfloat16."""
    w, x = b.bitcast(weights, i32x16.ir), splat_value(b, x, 16)
    if HAS_BF16:
        pairs = ir.VectorType(BFloat(), 32)
        args = (acc, b.bitcast(w, pairs), b.bitcast(x, pairs))
        return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", f32x16.ir, *args)
    for low in (True, False):
        parts = []
        for v in (w, x):
            bits = b.shl(v, constant(I32, 16, 16)) if low else b.and_(v, constant(I32, 16, 0xFFFF0000 - (1 << 32)))
            parts.append(b.bitcast(bits, f32x16.ir))
        acc = call(b, "llvm.fma.v16f32", f32x16.ir, *parts, acc)
    return acc


@intrinsic
def dot_tile(context, acc, weights, x, i, stride):
    """acc[r] += weights . x[i + r * stride : + 4 * len(weights)], bytes; weights: a tuple of u8x64.

    Integer sums: exact, so the order in which the tile interleaves them does not matter.
    """

    def generate(context, b, sig, args):
        accs, ws = vectors(b, sig.args[0], args[0]), vectors(b, sig.args[1], args[1])
        _, _, x, i, stride = args
        starts = [token_at(b, i, stride, r) for r in range(len(accs))]
        for j, w in enumerate(ws):
            for r, start in enumerate(starts):
                four = load(b, x, b.add(start, ir.Constant(I64, 4 * j)), I8, I32)
                accs[r] = _dpbusd(b, accs[r], w, four)
        return context.make_tuple(b, sig.return_type, accs)

    return acc(acc, weights, i64t, i64t, i64t), generate


@intrinsic
def bf16_tile(context, acc, w, x, i, stride):
    """acc[r] += w . x[i + 4 * r * stride], one pair of bfloat16 each; w: u8x64, 2 k of 16 rows."""

    def generate(context, b, sig, args):
        accs = vectors(b, sig.args[0], args[0])
        _, w, x, i, stride = args
        for r, acc_r in enumerate(accs):
            pair = load(b, x, b.add(i, b.mul(stride, ir.Constant(I64, 4 * r))), I8, I32)
            accs[r] = _dpbf16(b, acc_r, w, pair)
        return context.make_tuple(b, sig.return_type, accs)

    return acc(acc, u8x64, i64t, i64t, i64t), generate
