"""A small SIMD vocabulary for numba kernels: 16-lane vectors as first-class values inside jitted code.

Each name becomes one or two LLVM instructions. Vectors are plain LLVM vectors, so one kernel source serves every CPU:
LLVM splits 16 lanes into 2 AVX2 or 4 NEON registers by itself. What needs a special instruction stands in dot.py.

Memory is addressed by `(base, index)`: base is an int64 address, index counts elements of the type in the name.
No bounds, no negative indices: kernels get addresses from a tape that the recorder laid out.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, misc"

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from minserve.backend.numba_backend.jit import cpu_has, machine

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
LANES = 16


HAS_AVX512, HAS_BF16 = cpu_has("avx512f"), cpu_has("avx512bf16")
HAS_F16 = cpu_has("f16c") or machine() != "x86_64"


class BFloat(ir.Type):
    """llvmlite has no bfloat; as an element type it only needs to print."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


class Vector(types.Type):
    """A numba type that is an LLVM vector."""

    def __init__(self, name: str, element: ir.Type, lanes: int) -> None:
        super().__init__(name=name)
        self.ir = ir.VectorType(element, lanes)


f32x16, i32x16, u8x64 = Vector("f32x16", F32, 16), Vector("i32x16", I32, 16), Vector("u8x64", I8, 64)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, kind.ir)


# -- how an operation is declared


def op(result: types.Type, *arguments: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """Make `emit(builder, *values) -> value` callable from jitted code with this signature."""

    def declare(emit: Callable[..., Any]) -> Any:
        def generate(context, builder, sig, values):
            out = emit(builder, *values)
            return context.get_dummy_value() if result == types.void else out

        def typer(context, *given):
            return result(*arguments), generate

        typer.__name__ = emit.__name__
        typer.__doc__ = emit.__doc__
        names = ["context", *(f"a{i}" for i in range(len(arguments)))]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        typer.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
        return intrinsic(typer)

    return declare


def splat_value(b, scalar, lanes):
    """A scalar in all lanes."""
    v = b.insert_element(ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined), scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(v, v, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def constant(element, lanes, value):
    return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)


def call(b, name, result, *args):
    """Call an LLVM intrinsic or a C symbol by name."""
    fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(fn, args)


def pointer(b, base, index, element, whole=None):
    """Address base + index * sizeof(element) as a pointer to `whole` (default: the element)."""
    p = b.gep(b.inttoptr(base, element.as_pointer()), [index])
    return p if whole is None else b.bitcast(p, whole.as_pointer())


def load(b, base, index, element, whole=None):
    value = b.load(pointer(b, base, index, element, whole))
    value.align = 1
    return value


def store(b, value, base, index, element):
    b.store(value, pointer(b, base, index, element, value.type), align=1)


i64t, f32t = types.int64, types.float32


# -- vectors in memory


@op(f32x16, i64t, i64t)
def load_f32(b, p, i):
    """16 floats."""
    return load(b, p, i, F32, f32x16.ir)


def widen_f16(b, half, lanes):
    """float16 bits (int16, scalar or vector) -> float32. Without an instruction LLVM calls a function we don't have."""
    wide, single = I32, F32
    if lanes:
        wide, single = (ir.VectorType(t, lanes) for t in (I32, F32))
    if HAS_F16:
        return b.fpext(b.bitcast(half, ir.VectorType(F16, lanes) if lanes else F16), single)

    def number(kind, value):
        return ir.Constant(kind, [value] * lanes if lanes else value)

    bits = b.zext(half, wide)
    sign = b.shl(b.and_(bits, number(wide, 0x8000)), number(wide, 16))
    magnitude = b.shl(b.and_(bits, number(wide, 0x7FFF)), number(wide, 13))
    scaled = b.bitcast(b.fmul(b.bitcast(magnitude, single), number(single, 2.0**112)), wide)  # exact, subnormals too
    special = b.icmp_unsigned(">=", magnitude, number(wide, 0x7C00 << 13))  # infinity, NaN
    scaled = b.select(special, b.or_(magnitude, number(wide, 0x7F800000)), scaled)
    return b.bitcast(b.or_(scaled, sign), single)


@op(f32x16, i64t, i64t)
def load_f16(b, p, i):
    """16 halves, widened."""
    return widen_f16(b, load(b, p, i, I16, ir.VectorType(I16, 16)), 16)


@op(u8x64, i64t, i64t)
def load_u8(b, p, i):
    """64 bytes."""
    return load(b, p, i, I8, u8x64.ir)


@op(f32x16, i64t, i64t)
def load_bytes(b, p, i):
    """16 unsigned bytes as floats."""
    return b.uitofp(load(b, p, i, I8, ir.VectorType(I8, 16)), f32x16.ir)


@op(f32x16, i64t, i64t)
def load_signed(b, p, i):
    """16 signed bytes as floats."""
    return b.sitofp(load(b, p, i, I8, ir.VectorType(I8, 16)), f32x16.ir)


@op(types.void, i64t, i64t, f32x16)
def store_f32(b, p, i, v):
    store(b, v, p, i, F32)


@op(types.void, i64t, i64t, i32x16)
def store_i32(b, p, i, v):
    store(b, v, p, i, I32)


@op(types.void, i64t, i64t, f32x16)
def store_i8(b, p, i, v):
    """16 floats that already are integers in -128..127."""
    store(b, b.trunc(b.fptosi(v, i32x16.ir), ir.VectorType(I8, 16)), p, i, I8)


@op(types.void, i64t, i64t, f32x16)
def store_bf16(b, p, i, v):
    """Round to nearest even."""
    if HAS_BF16:
        half = call(b, "llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(BFloat(), 16), v)
        store(b, b.bitcast(half, ir.VectorType(I16, 16)), p, i, I16)
        return
    bits = b.bitcast(v, i32x16.ir)
    odd = b.and_(b.lshr(bits, constant(I32, 16, 16)), constant(I32, 16, 1))
    bits = b.lshr(b.add(bits, b.add(odd, constant(I32, 16, 0x7FFF))), constant(I32, 16, 16))
    store(b, b.trunc(bits, ir.VectorType(I16, 16)), p, i, I16)


# -- scalars in memory


@op(f32t, i64t, i64t)
def f32(b, p, i):
    return load(b, p, i, F32)


@op(types.float64, i64t, i64t)
def f64(b, p, i):
    return load(b, p, i, F64)


@op(f32t, i64t, i64t)
def f16(b, p, i):
    return widen_f16(b, load(b, p, i, I16), 0)


@op(f32t, i64t, i64t)
def bf16(b, p, i):
    return b.bitcast(b.shl(b.zext(load(b, p, i, I16), I32), ir.Constant(I32, 16)), F32)


@op(i64t, i64t, i64t)
def u8(b, p, i):
    return b.zext(load(b, p, i, I8), I64)


@op(i64t, i64t, i64t)
def u16(b, p, i):
    return b.zext(load(b, p, i, I16), I64)


@op(i64t, i64t, i64t)
def i8(b, p, i):
    return b.sext(load(b, p, i, I8), I64)


@op(i64t, i64t, i64t)
def i32(b, p, i):
    return b.sext(load(b, p, i, I32), I64)


@op(i64t, i64t, i64t)
def i64(b, p, i):
    return load(b, p, i, I64)


@op(types.void, i64t, i64t, f32t)
def set_f32(b, p, i, v):
    store(b, v, p, i, F32)


@op(types.void, i64t, i64t, i64t)
def set_u16(b, p, i, v):
    store(b, b.trunc(v, I16), p, i, I16)


@op(types.void, i64t, i64t, i64t)
def set_i32(b, p, i, v):
    store(b, b.trunc(v, I32), p, i, I32)


@op(types.void, i64t, i64t, i64t)
def set_i64(b, p, i, v):
    store(b, v, p, i, I64)


@op(types.void, i64t)
def prefetch(b, p):
    """Bring the cache line of an address closer."""
    args = (b.inttoptr(p, I8.as_pointer()), ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1))
    call(b, "llvm.prefetch.p0", ir.VoidType(), *args)


@op(types.void, i64t)
def prefetch_l2(b, p):
    """The same, no closer than the L2 cache: for what is wanted a while later."""
    args = (b.inttoptr(p, I8.as_pointer()), ir.Constant(I32, 0), ir.Constant(I32, 2), ir.Constant(I32, 1))
    call(b, "llvm.prefetch.p0", ir.VoidType(), *args)


@op(types.void, i64t, i64t)
def zero_bytes(b, target, n):
    args = (b.inttoptr(target, I8.as_pointer()), ir.Constant(I8, 0), n, ir.Constant(I1, 0))
    call(b, "llvm.memset.p0.i64", ir.VoidType(), *args)


# -- arithmetic


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
    """x * 2^n for integers n >= -200; below -126 it is 0."""
    if HAS_AVX512:
        args = (x, n, x, ir.Constant(I16, 0xFFFF - (1 << 16)), ir.Constant(I32, 4))
        return call(b, "llvm.x86.avx512.mask.scalef.ps.512", f32x16.ir, *args)
    low = b.select(b.fcmp_ordered(">", n, constant(F32, 16, -127.0)), n, constant(F32, 16, -127.0))
    exponent = b.shl(b.add(b.fptosi(low, i32x16.ir), constant(I32, 16, 127)), constant(I32, 16, 23))
    return b.fmul(x, b.bitcast(exponent, f32x16.ir))


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
