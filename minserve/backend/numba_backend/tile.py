"""Tiles: tuples of R accumulators, one vector of 16 rows per token, that share each load of weights.

R is part of the numba type, so a kernel's loops over a tile unroll. Owns how tiles begin, what happens to integer sums
on the way, and how they end in memory, scaled. It must not know dot products (dot.py), which fill tiles.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, misc"

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from minserve.backend.numba_backend.simd_types import (
    F32,
    I8,
    I32,
    I64,
    call,
    constant,
    f32x16,
    i32x16,
    i64t,
    load,
    splat_value,
    store,
)


def vectors(b, kind, tile):
    """The LLVM values of a tile."""
    return cgutils.unpack_tuple(b, tile, kind.count)


def token_at(b, i, stride, r):
    """i + r * stride: where token r begins."""
    return b.add(i, b.mul(stride, ir.Constant(I64, r)))


# -- begin


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


def _loaded(kind):
    def typer(context, shape, x):
        tile = types.UniTuple(kind, shape.count)

        def generate(context, b, sig, args):
            out = [load(b, args[1], ir.Constant(I64, 16 * r), kind.ir.element, kind.ir) for r in range(shape.count)]
            return context.make_tuple(b, sig.return_type, out)

        return tile(shape, i64t), generate

    return typer


@intrinsic
def tile_load_i32(context, shape, x):
    """x [R][16] int32, R that of the tuple `shape`."""
    return _loaded(i32x16)(context, shape, x)


@intrinsic
def tile_load_f32(context, shape, x):
    return _loaded(f32x16)(context, shape, x)


@intrinsic
def zeros_like(context, shape):
    """A tile of zero vectors as long as the tuple `shape`, whose length is part of its type."""
    tile = types.UniTuple(f32x16, shape.count)
    zero = constant(F32, 16, 0.0)
    return tile(shape), lambda context, b, sig, args: context.make_tuple(b, tile, [zero] * tile.count)


# -- integer sums


@intrinsic
def tile_sum(context, t, u):
    def generate(context, b, sig, args):
        pairs = zip(*(vectors(b, sig.args[0], tile) for tile in args), strict=True)
        return context.make_tuple(b, sig.return_type, [b.add(v, w) for v, w in pairs])

    return t(t, t), generate


@intrinsic
def tile_shift(context, tile, by):
    """Each lane times 2^by."""

    def generate(context, b, sig, args):
        by = splat_value(b, b.trunc(args[1], I32), 16)
        out = [b.shl(v, by) for v in vectors(b, sig.args[0], args[0])]
        return context.make_tuple(b, sig.return_type, out)

    return tile(tile, i64t), generate


def _bias(combine):
    def typer(context, tile, x, i, shift):
        def generate(context, b, sig, args):
            _, x, i, shift = args
            by = splat_value(b, b.trunc(shift, I32), 16)
            out = []
            for r, v in enumerate(vectors(b, sig.args[0], args[0])):
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


# -- end in memory


@intrinsic
def tile_store(context, tile, x, i, stride):
    def generate(context, b, sig, args):
        tile, x, i, stride = args
        for r, v in enumerate(vectors(b, sig.args[0], tile)):
            store(b, v, x, token_at(b, i, stride, r), F32)
        return context.get_dummy_value()

    return types.void(tile, i64t, i64t, i64t), generate


@intrinsic
def store_all(context, vs, x):
    """x [vectors][64 bytes] = a tuple of Bytes."""

    def generate(context, b, sig, args):
        for r, v in enumerate(vectors(b, sig.args[0], args[0])):
            store(b, v, args[1], ir.Constant(I64, 64 * r), I8)
        return context.get_dummy_value()

    return types.void(vs, i64t), generate


def _plus_scaled(b, old, v, scale, d, at):
    """old + float(v) * scale * d[at]."""
    scaled = b.fmul(b.sitofp(v, f32x16.ir), scale)
    return call(b, "llvm.fma.v16f32", f32x16.ir, scaled, splat_value(b, load(b, d, at, F32), 16), old)


def _plus_minimum(b, old, minimum, s, at):
    """old + minimum * s[at]."""
    return call(b, "llvm.fma.v16f32", f32x16.ir, minimum, splat_value(b, load(b, s, at, F32), 16), old)


def _in_memory(b, acc, at, step):
    """acc[at] = step(acc[at]), a row of 16 floats."""
    row = b.mul(at, ir.Constant(I64, 16))
    store(b, step(load(b, acc, row, F32, f32x16.ir)), acc, row, F32)


@intrinsic
def add_scaled(context, tile, scale, d, acc, m):
    """acc[m + r] += tile[r] * scale * d[m + r]."""

    def generate(context, b, sig, args):
        tile, scale, d, acc, m = args
        for r, v in enumerate(vectors(b, sig.args[0], tile)):
            at = b.add(m, ir.Constant(I64, r))
            _in_memory(b, acc, at, lambda old, v=v, at=at: _plus_scaled(b, old, v, scale, d, at))
        return context.get_dummy_value()

    return types.void(tile, f32x16, i64t, i64t, i64t), generate


@intrinsic
def add_affine(context, tile, scale, minimum, d, s, acc, m):
    """acc[m + r] += tile[r] * scale * d[m + r] + minimum * s[m + r]."""

    def generate(context, b, sig, args):
        tile, scale, minimum, d, s, acc, m = args
        for r, v in enumerate(vectors(b, sig.args[0], tile)):
            at = b.add(m, ir.Constant(I64, r))

            def step(old, v=v, at=at):
                return _plus_scaled(b, _plus_minimum(b, old, minimum, s, at), v, scale, d, at)

            _in_memory(b, acc, at, step)
        return context.get_dummy_value()

    return types.void(tile, f32x16, f32x16, i64t, i64t, i64t, i64t), generate


# -- the same where the sums of floats stay in registers


@intrinsic
def plus_scaled(context, sums, tile, scale, d):
    """sums[r] + tile[r] * scale * d[r]."""

    def generate(context, b, sig, args):
        sums, tile, scale, d = args
        out = [
            _plus_scaled(b, old, v, scale, d, ir.Constant(I64, r))
            for r, (old, v) in enumerate(zip(vectors(b, sig.args[0], sums), vectors(b, sig.args[1], tile), strict=True))
        ]
        return context.make_tuple(b, sig.return_type, out)

    return sums(sums, tile, f32x16, i64t), generate


@intrinsic
def plus_affine(context, sums, tile, scale, minimum, d, s):
    """sums[r] + tile[r] * scale * d[r] + minimum * s[r]."""

    def generate(context, b, sig, args):
        sums, tile, scale, minimum, d, s = args
        out = []
        for r, (old, v) in enumerate(zip(vectors(b, sig.args[0], sums), vectors(b, sig.args[1], tile), strict=True)):
            at = ir.Constant(I64, r)
            out.append(_plus_scaled(b, _plus_minimum(b, old, minimum, s, at), v, scale, d, at))
        return context.make_tuple(b, sig.return_type, out)

    return sums(sums, tile, f32x16, f32x16, i64t, i64t), generate
