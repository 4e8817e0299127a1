"""The types of a small SIMD vocabulary for numba kernels, and how its operations are declared.

Owns vectors of 16 lanes as first-class values inside jitted code, `op`, and the helpers that build LLVM instructions.
It must not know any operation: those are in simd_memory.py, simd_math.py, tile.py and dot.py. Vectors are plain LLVM
vectors, so one kernel source serves every CPU: LLVM splits 16 lanes into 2 AVX2 or 4 NEON registers by itself.

Memory is addressed by `(base, index)`: base is an int64 address, index counts elements. No bounds, no negative indices:
kernels get addresses from a tape that the recorder laid out.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, misc"

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from minserve.backend.numba_backend.jit import cpu_has

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
i64t, f32t = types.int64, types.float32

HAS_BF16 = cpu_has("avx512bf16")


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


class Bytes(Vector):
    """64 bytes, of which only the low `bits` bits can be set: dot products may then be cheaper."""

    def __init__(self, bits: int) -> None:
        super().__init__(f"u{bits}x64", I8, 64)
        self.bits = bits


f32x16, i32x16, u4x64, u8x64 = Vector("f32x16", F32, 16), Vector("i32x16", I32, 16), Bytes(4), Bytes(8)


@register_model(Vector)
@register_model(Bytes)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, kind.ir)


# -- building LLVM instructions


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


@intrinsic(prefer_literal=True)
def room(context, nbytes):
    """Address of so many bytes of the kernel's stack, a multiple of 64; nbytes must be a literal."""
    if not isinstance(nbytes, types.IntegerLiteral):
        return None

    def generate(context, b, sig, args):
        with b.goto_entry_block():  # unlike numba's own, not filled with zeros at every call
            place = b.alloca(ir.ArrayType(I8, nbytes.literal_value))
        place.align = 64
        return b.ptrtoint(place, I64)

    return i64t(nbytes), generate


# -- declaring an operation


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
