"""The SIMD vocabulary's way to memory: loads, stores and prefetches, of vectors and of single numbers.

Each name becomes one or two LLVM instructions, more where the CPU lacks one. Owns the formats that numbers have in
memory; in registers they are float32, int32 or bytes. It must not know what is computed.

`load_x(p, i)` and `store_x(p, i, v)` move 16 lanes (load_u8: 64 bytes), `x(p, i)` and `set_x(p, i, v)` a single number.
Index i counts elements of the type in the name.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, misc"

from __future__ import annotations

from llvmlite import ir
from numba import types

from minserve.backend.numba_backend.jit import cpu_has, machine
from minserve.backend.numba_backend.simd_types import (
    F16,
    F32,
    F64,
    HAS_BF16,
    I1,
    I8,
    I16,
    I32,
    I64,
    BFloat,
    call,
    constant,
    f32t,
    f32x16,
    i32x16,
    i64t,
    load,
    op,
    store,
    u8x64,
)

HAS_F16 = cpu_has("f16c") or machine() != "x86_64"

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
