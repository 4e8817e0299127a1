"""Dot products: the only operations for which the CPU's features choose the instructions.

`dot_tile` multiplies unsigned bytes (weights) with signed bytes (activations) into int32: vpdpbusd with AVX-512 VNNI;
with AVX2 vpmaddubsw, or vpmaddwd for weights of 8 bits; plain widening arithmetic elsewhere. The integers are the same.
`bf16_tile` multiplies pairs of bfloat16 into float32: vdpbf16ps, or two fused multiply-adds elsewhere. `float_tile`
takes pairs of float32 on one side and is always two fused multiply-adds.

All go through a tile (tile.py), whose R chains hide the instruction's latency.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, misc"

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from minserve.backend.numba_backend.jit import cpu_has
from minserve.backend.numba_backend.simd_types import (
    F32,
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
    op,
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


@op(types.void)
def align_stack(b):
    """Called once by a kernel of dot products. AVX2's 16 registers don't hold a group of weights, and what LLVM puts on
    the stack it aligns to 16 bytes, so some of it crosses cache lines, unless it sees early that something needs more.
    With AVX-512 little is put there, and aligning costs one token 5 %."""
    if HAS_AVX2:
        place = cgutils.alloca_once(b, ir.ArrayType(I8, 64))
        place.align = 64
        b.asm(ir.FunctionType(ir.VoidType(), [place.type]), "", "r", [place], side_effect=True)


# -- one step: acc[r] += sum of 4 weight bytes of row r (unsigned) times the 4 signed bytes of x, the same for every row


def _vnni(b, acc, weights, x):
    args = (acc, b.bitcast(weights, _VNNI_OPERAND), b.bitcast(splat_value(b, x, 16), _VNNI_OPERAND))
    return call(b, "llvm.x86.avx512.vpdpbusd.512", i32x16.ir, *args)


def _portable(b, acc, weights, x):
    """Even and odd bytes as int16, multiplied and added in pairs."""
    short, wide, eight = ir.VectorType(I16, 32), ir.VectorType(I32, 32), constant(I16, 32, 8)
    w, x = b.bitcast(weights, short), b.bitcast(splat_value(b, x, 16), short)
    halves = ((b.and_(w, constant(I16, 32, 255)), b.ashr(b.shl(x, eight), eight)), (b.lshr(w, eight), b.ashr(x, eight)))
    for wh, xh in halves:
        product = b.mul(b.sext(wh, wide), b.sext(xh, wide))
        pairs = [
            b.shuffle_vector(product, product, ir.Constant(ir.VectorType(I32, 16), list(range(first, 32, 2))))
            for first in (0, 1)
        ]
        acc = b.add(acc, b.add(*pairs))
    return acc


def _avx2_bytes(b, acc, weights, x):
    """The same in vpmaddwd: left to itself, LLVM takes twice the instructions."""
    eight = constant(I16, 16, 8)
    x = b.bitcast(splat_value(b, x, 8), eight.type)
    even, odd = b.ashr(b.shl(x, eight), eight), b.ashr(x, eight)
    sums = []
    for half in _halves(b, weights):
        w = b.bitcast(half, eight.type)
        sums.append(b.add(_maddwd(b, b.and_(w, constant(I16, 16, 255)), even), _maddwd(b, b.lshr(w, eight), odd)))
    return b.add(acc, _joined(b, sums))


def _avx2_bits(b, acc, weights, xs):
    """The same for several vectors of weights in vpmaddubsw. It saturates, so `_room` says for how many."""
    sums = []
    for halves in zip(*(_halves(b, w) for w in weights), strict=True):
        total = constant(I16, 16, 0)
        for half, x in zip(halves, xs, strict=True):
            args = half, b.bitcast(splat_value(b, x, 8), half.type)
            total = b.add(total, call(b, "llvm.x86.avx2.pmadd.ub.sw", total.type, *args))
        sums.append(_maddwd(b, total, constant(I16, 16, 1)))
    return b.add(acc, _joined(b, sums))


def _room(kind):
    """How many vectors of weights of this kind (Bytes) 16 bits have room for: two products each, by up to 128."""
    return 0x7FFF // (2 * 128 * ((1 << kind.bits) - 1)) if HAS_AVX2 else 0


def _runs(kinds):
    """(first, last) of the vectors of weights that are taken in one step."""
    first = 0
    for j, kind in enumerate(kinds, start=1):
        if j == len(kinds) or kinds[j] != kind or j - first >= _room(kind):
            yield first, j
            first = j


def _step(b, acc, kind, weights, xs):
    if _room(kind):
        return _avx2_bits(b, acc, weights, xs)
    one = _vnni if HAS_VNNI else _avx2_bytes if HAS_AVX2 else _portable
    return one(b, acc, *weights, *xs)


def _halves(b, weights):
    """64 bytes as two of AVX2's registers."""
    for first in (0, 32):
        yield b.shuffle_vector(weights, weights, ir.Constant(ir.VectorType(I32, 32), list(range(first, first + 32))))


def _joined(b, sums):
    return b.shuffle_vector(*sums, ir.Constant(i32x16.ir, list(range(16))))


def _maddwd(b, x, y):
    """Pairs of int16, multiplied and added into int32."""
    return call(b, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), x, y)


def _dpbf16(b, acc, weights, x):
    """acc[r] += w[r][0] * x[0] + w[r][1] * x[1] for pairs of bfloat16."""
    w, x = b.bitcast(weights, i32x16.ir), splat_value(b, x, 16)
    if HAS_BF16:
        pairs = ir.VectorType(BFloat(), 32)
        args = (acc, b.bitcast(w, pairs), b.bitcast(x, pairs))
        return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", f32x16.ir, *args)
    for parts in zip(_widened(b, w), _widened(b, x), strict=True):
        acc = call(b, "llvm.fma.v16f32", f32x16.ir, *parts, acc)
    return acc


def _widened(b, pairs):
    """The first and the second of 16 pairs of bfloat16, as float32."""
    halves = b.shl(pairs, constant(I32, 16, 16)), b.and_(pairs, constant(I32, 16, 0xFFFF0000 - (1 << 32)))
    return [b.bitcast(half, f32x16.ir) for half in halves]


@intrinsic
def dot_tile(context, acc, weights, x, i, stride):
    """acc[r] += weights . x[i + r * stride : + 4 * len(weights)], bytes; weights: a tuple of Bytes.

    Integer sums: exact, so the order in which the tile interleaves them does not matter.
    """

    def generate(context, b, sig, args):
        accs, ws = vectors(b, sig.args[0], args[0]), vectors(b, sig.args[1], args[1])
        _, _, x, i, stride = args
        starts = [token_at(b, i, stride, r) for r in range(len(accs))]
        kinds = list(sig.args[1])
        for first, last in _runs(kinds):
            for r, start in enumerate(starts):
                xs = [load(b, x, b.add(start, ir.Constant(I64, 4 * j)), I8, I32) for j in range(first, last)]
                accs[r] = _step(b, accs[r], kinds[first], ws[first:last], xs)
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


@intrinsic
def float_tile(context, acc, w, x, i, stride):
    """The same with pairs of float32: acc[r] += w . x[i + 8 * r * stride]."""

    def generate(context, b, sig, args):
        accs = vectors(b, sig.args[0], args[0])
        _, w, x, i, stride = args
        for k, half in enumerate(_widened(b, b.bitcast(w, i32x16.ir))):
            for r, acc_r in enumerate(accs):
                at = b.add(i, b.add(b.mul(stride, ir.Constant(I64, 8 * r)), ir.Constant(I64, 4 * k)))
                number = splat_value(b, b.bitcast(load(b, x, at, I8, I32), F32), 16)
                accs[r] = call(b, "llvm.fma.v16f32", f32x16.ir, half, number, acc_r)
        return context.make_tuple(b, sig.return_type, accs)

    return acc(acc, u8x64, i64t, i64t, i64t), generate
