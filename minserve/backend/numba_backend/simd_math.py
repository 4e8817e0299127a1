"""The SIMD vocabulary's arithmetic: what kernels do with vectors of 16 floats, and `+ - * /` on them.

Each name becomes one or two LLVM instructions. It must not know memory (simd_memory.py). Dot products, for which the
CPU's features choose the instructions, stand in dot.py.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, misc"

from __future__ import annotations

import operator

from llvmlite import ir
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import lower_builtin

from minserve.backend.numba_backend.jit import cpu_has
from minserve.backend.numba_backend.simd_types import (
    F32,
    I16,
    I32,
    I64,
    call,
    constant,
    f32t,
    f32x16,
    i32x16,
    i64t,
    op,
    splat_value,
)

HAS_AVX512 = cpu_has("avx512f")


@op(f32x16, f32t)
def splat(b, x):
    return splat_value(b, x, 16)


@op(f32x16, f32x16, f32x16, f32x16)
def fma(b, x, y, z):
    """x * y + z, rounded once."""
    return call(b, "llvm.fma.v16f32", f32x16.ir, x, y, z)


@op(f32x16, f32x16, f32x16)
def vmax(b, x, y):
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@op(f32x16, f32x16, f32x16)
def vmin(b, x, y):
    return b.select(b.fcmp_ordered("<", x, y), x, y)


def lane_bits(b, mask):
    """16 booleans as the low bits of an int64."""
    return b.zext(b.bitcast(mask, I16), I64)


@op(i64t, f32x16, f32x16)
def unordered(b, x, y):
    """A bit per lane in which x or y is NaN."""
    return lane_bits(b, b.fcmp_unordered("uno", x, y))


@op(i64t, f32x16, f32x16)
def count_at_least(b, x, low):
    """How many lanes have x >= low."""
    return call(b, "llvm.ctpop.i64", I64, lane_bits(b, b.fcmp_ordered(">=", x, low)))


@op(f32x16, f32x16, f32x16, f32x16)
def keep_at_least(b, x, y, low):
    """x where y >= low, else 0."""
    return b.select(b.fcmp_ordered(">=", y, low), x, constant(F32, 16, 0.0))


@op(f32x16, f32x16)
def vabs(b, x):
    return call(b, "llvm.fabs.v16f32", f32x16.ir, x)


@op(f32x16, f32x16)
def vfloor(b, x):
    return call(b, "llvm.floor.v16f32", f32x16.ir, x)


@op(f32x16, f32x16)
def vround(b, x):
    """To the nearest integer, ties to even."""
    return call(b, "llvm.rint.v16f32", f32x16.ir, x)


def _fold(b, x, combine):
    """Halve a vector, combining its halves, down to one lane: in an order of our own, the same on every machine."""
    lanes = 16
    while lanes > 1:
        lanes //= 2
        halves = [
            b.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, lanes), list(range(first, first + lanes))))
            for first in (0, lanes)
        ]
        x = combine(*halves)
    return b.extract_element(x, ir.Constant(I32, 0))


@op(f32t, f32x16)
def hsum(b, x):
    return _fold(b, x, b.fadd)


@op(f32t, f32x16)
def hmax(b, x):
    return _fold(b, x, lambda low, high: b.select(b.fcmp_ordered(">", low, high), low, high))


@op(f32x16, f32x16, f32x16)
def times_power(b, x, n):
    """x * 2^n for integers n from -126 to 127."""
    if HAS_AVX512:
        args = (x, n, x, ir.Constant(I16, 0xFFFF - (1 << 16)), ir.Constant(I32, 4))
        return call(b, "llvm.x86.avx512.mask.scalef.ps.512", f32x16.ir, *args)
    exponent = b.shl(b.add(b.fptosi(n, i32x16.ir), constant(I32, 16, 127)), constant(I32, 16, 23))
    return b.fmul(x, b.bitcast(exponent, f32x16.ir))


@op(f32x16, f32x16, f32x16, f32x16, f32x16)
def where_below(b, x, bound, low, high):
    """low where x < bound, else high."""
    return b.select(b.fcmp_ordered("<", x, bound), low, high)


@op(i64t, f32t)
def float_bits(b, x):
    return b.zext(b.bitcast(x, I32), I64)


@op(f32t, i64t)
def bits_float(b, bits):
    return b.bitcast(b.trunc(bits, I32), F32)


def _operator(operation, kind, emit):
    @infer_global(operation)
    class _Template(ConcreteTemplate):
        cases = [signature(kind, kind, kind)]  # noqa: RUF012

    lower_builtin(operation, kind, kind)(lambda context, b, sig, args: emit(b, *args))


_operator(operator.add, f32x16, lambda b, x, y: b.fadd(x, y))
_operator(operator.sub, f32x16, lambda b, x, y: b.fsub(x, y))
_operator(operator.mul, f32x16, lambda b, x, y: b.fmul(x, y))
_operator(operator.truediv, f32x16, lambda b, x, y: b.fdiv(x, y))
_operator(operator.add, i32x16, lambda b, x, y: b.add(x, y))
_operator(operator.sub, i32x16, lambda b, x, y: b.sub(x, y))
