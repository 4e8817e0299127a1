"""Dot products: the only operations for which the CPU's features choose the instructions.

`dot_tile` multiplies unsigned bytes (weights) with signed bytes (activations) into int32: vpdpbusd with AVX-512 VNNI,
vpmaddubsw or vpmaddwd with AVX2, plain widening arithmetic elsewhere; the integers are the same everywhere.
`bf16_tile` multiplies pairs of bfloat16 into float32: vdpbf16ps, or two fused multiply-adds elsewhere.

A *tile* is a tuple of R accumulators, one per token, that share each load of weights. R is part of the numba type, so a
kernel's loops over it unroll, and the R chains hide the instruction's latency.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, misc"

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from minserve.backend.numba_backend.jit import cpu_has
from minserve.backend.numba_backend.simd import (
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
    load,
    op,
    splat_value,
    store,
    u8x64,
)

HAS_VNNI = cpu_has("avx512vnni")
HAS_AVX2 = cpu_has("avx2") and not HAS_VNNI
i64t = types.int64


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


# -- tuples of vectors


def _unpack(b, kind, value):
    return cgutils.unpack_tuple(b, value, kind.count)


def _offset(b, i, stride, r):
    return b.add(i, b.mul(stride, ir.Constant(I64, r)))


@intrinsic
def dot_tile(context, acc, weights, x, i, stride):
    """acc[r] += weights . x[i + r * stride : + 4 * len(weights)], bytes; weights: a tuple of u8x64.

    Integer sums: exact, so the order in which the tile interleaves them does not matter.
    """

    def generate(context, b, sig, args):
        accs, ws = _unpack(b, sig.args[0], args[0]), _unpack(b, sig.args[1], args[1])
        _, _, x, i, stride = args
        starts = [_offset(b, i, stride, r) for r in range(len(accs))]
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
        accs = _unpack(b, sig.args[0], args[0])
        _, w, x, i, stride = args
        for r, acc_r in enumerate(accs):
            pair = load(b, x, b.add(i, b.mul(stride, ir.Constant(I64, 4 * r))), I8, I32)
            accs[r] = _dpbf16(b, acc_r, w, pair)
        return context.make_tuple(b, sig.return_type, accs)

    return acc(acc, u8x64, i64t, i64t, i64t), generate


@intrinsic
def tile_store(context, tile, x, i, stride):
    def generate(context, b, sig, args):
        tile, x, i, stride = args
        for r, v in enumerate(_unpack(b, sig.args[0], tile)):
            store(b, v, x, _offset(b, i, stride, r), F32)
        return context.get_dummy_value()

    return types.void(tile, i64t, i64t, i64t), generate


def _zeros(kind):
    def typer(context, n):
        if not isinstance(n, types.IntegerLiteral):
            return None
        tile = types.UniTuple(kind, n.literal_value)
        zero = constant(kind.ir.element, 16, 0)
        return tile(n), lambda context, b, sig, args: context.make_tuple(b, tile, [zero] * tile.count)

    return typer


@intrinsic(prefer_literal=True)
def zeros_f32(context, n):
    """A tile of n zero vectors; n must be a literal."""
    return _zeros(f32x16)(context, n)


@intrinsic(prefer_literal=True)
def zeros_i32(context, n):
    return _zeros(i32x16)(context, n)


@intrinsic
def zeros_like(context, shape):
    """A tile of zero vectors as long as the tuple `shape`, whose length is part of its type."""
    tile = types.UniTuple(f32x16, shape.count)
    zero = constant(F32, 16, 0.0)
    return tile(shape), lambda context, b, sig, args: context.make_tuple(b, tile, [zero] * tile.count)


@intrinsic
def tile_shift(context, tile, by):
    """Each lane times 2^by."""

    def generate(context, b, sig, args):
        by = splat_value(b, b.trunc(args[1], I32), 16)
        out = [b.shl(v, by) for v in _unpack(b, sig.args[0], args[0])]
        return context.make_tuple(b, sig.return_type, out)

    return tile(tile, i64t), generate


def _bias(combine):
    def typer(context, tile, x, i, shift):
        def generate(context, b, sig, args):
            _, x, i, shift = args
            by = splat_value(b, b.trunc(shift, I32), 16)
            out = []
            for r, v in enumerate(_unpack(b, sig.args[0], args[0])):
                bias = splat_value(b, load(b, x, b.add(i, ir.Constant(I64, r)), I32), 16)
                out.append(getattr(b, combine)(v, b.shl(bias, by)))
            return context.make_tuple(b, sig.return_type, out)

        return tile(tile, i64t, i64t, i64t), generate

    return typer


@intrinsic
def tile_bias(context, tile, x, i, shift):
    """tile[r] + (x[i + r] << shift), x int32."""
    return _bias("add")(context, tile, x, i, shift)


@intrinsic
def tile_unbias(context, tile, x, i, shift):
    """tile[r] - (x[i + r] << shift), x int32."""
    return _bias("sub")(context, tile, x, i, shift)


def _accumulate(b, kind, tile, scale, d, acc, m, addend):
    """acc[m + r] = float(tile[r]) * scale * d[m + r] + addend(r, acc[m + r]); acc rows of 16 floats."""
    for r, v in enumerate(_unpack(b, kind, tile)):
        at = b.add(m, ir.Constant(I64, r))
        row = b.mul(at, ir.Constant(I64, 16))
        scaled = b.fmul(b.sitofp(v, f32x16.ir), scale)
        by = splat_value(b, load(b, d, at, F32), 16)
        old = addend(at, load(b, acc, row, F32, f32x16.ir))
        store(b, call(b, "llvm.fma.v16f32", f32x16.ir, scaled, by, old), acc, row, F32)


@intrinsic
def add_scaled(context, tile, scale, d, acc, m):
    """acc[m + r] += tile[r] * scale * d[m + r]."""

    def generate(context, b, sig, args):
        tile, scale, d, acc, m = args
        _accumulate(b, sig.args[0], tile, scale, d, acc, m, lambda at, old: old)
        return context.get_dummy_value()

    return types.void(tile, f32x16, i64t, i64t, i64t), generate


@intrinsic
def add_affine(context, tile, scale, minimum, d, s, acc, m):
    """acc[m + r] += tile[r] * scale * d[m + r] + minimum * s[m + r]."""

    def generate(context, b, sig, args):
        tile, scale, minimum, d, s, acc, m = args

        def with_minimum(at, old):
            sums = splat_value(b, load(b, s, at, F32), 16)
            return call(b, "llvm.fma.v16f32", f32x16.ir, minimum, sums, old)

        _accumulate(b, sig.args[0], tile, scale, d, acc, m, with_minimum)
        return context.get_dummy_value()

    return types.void(tile, f32x16, f32x16, i64t, i64t, i64t, i64t), generate


# -- unpacking weights: 64 bytes are 4 k of 16 rows


@op(u8x64, u8x64)
def low_nibbles(b, v):
    return b.and_(v, constant(I8, 64, 15))


@op(u8x64, u8x64)
def high_nibbles(b, v):
    return b.lshr(v, constant(I8, 64, 4))


@intrinsic(prefer_literal=True)
def add_bits(context, v, planes, bit, width, to):
    """v | (the `width` bits of each byte of planes from `bit` on) << to; the last three must be literals."""
    if not all(isinstance(a, types.IntegerLiteral) for a in (bit, width, to)):
        return None
    shift, mask = to.literal_value - bit.literal_value, ((1 << width.literal_value) - 1) << to.literal_value

    def generate(context, b, sig, args):
        moved = args[1]
        if shift > 0:
            moved = b.shl(moved, constant(I8, 64, shift))
        elif shift < 0:
            moved = b.lshr(moved, constant(I8, 64, -shift))
        return b.or_(args[0], b.and_(moved, constant(I8, 64, mask)))

    return u8x64(u8x64, u8x64, bit, width, to), generate
