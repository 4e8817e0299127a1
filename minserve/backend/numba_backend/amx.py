"""Intel AMX, the processor's matrix unit: eight registers that hold matrices of up to 16 lines of 64 bytes.

Owns the unit's instructions, a function each; registers are literals, 0 to 7. It must not know what is multiplied.

A product takes lines of the left matrix and of the right one, which holds groups of 4 bytes: of each line the n-th
four bytes belong to its column n. So sums [m, n] += the dot product of line m, left, with all fours of column n: 64
products of bytes, or 32 of bfloat16. Sums of integers are exact; those of bfloat16 are made in an order of the unit's
own, which does not depend on how many lines there are.

Linux hands the registers out on request: once, for all threads of the process.
Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, misc"

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from minserve.backend.numba_backend.jit import cpu_has, may_use_amx
from minserve.backend.numba_backend.simd_types import I8, I16, I64, call, i64t, op, pointer, store

HAS_AMX = all(cpu_has(feature) for feature in ("amx-tile", "amx-int8", "amx-bf16")) and may_use_amx()

REGISTERS = 8
UNUSED = (0, 0)


def _unit(b, name, *args):
    call(b, f"llvm.x86.{name}", ir.VoidType(), *args)


def _byte_at(b, address):
    return pointer(b, address, ir.Constant(I64, 0), I8)


@intrinsic
def begin_matrices(context, shapes):
    """shapes: (lines, bytes of a line) of each register. The registers are empty then."""
    if shapes != types.UniTuple(types.UniTuple(i64t, 2), REGISTERS):
        return None

    def generate(context, b, sig, args):
        with b.goto_entry_block():
            place = b.alloca(ir.ArrayType(I64, 8))
        at = b.ptrtoint(place, I64)
        for word in range(8):
            store(b, ir.Constant(I64, int(word == 0)), at, ir.Constant(I64, word), I64)  # palette 1
        for register, shape in enumerate(cgutils.unpack_tuple(b, args[0], REGISTERS)):
            lines, nbytes = cgutils.unpack_tuple(b, shape, 2)
            store(b, b.trunc(nbytes, I16), at, ir.Constant(I64, 8 + register), I16)
            store(b, b.trunc(lines, I8), at, ir.Constant(I64, 48 + register), I8)
        _unit(b, "ldtilecfg", _byte_at(b, at))
        return context.get_dummy_value()

    return types.void(shapes), generate


@op(types.void)
def end_matrices(b):
    """The system need not save the registers for this thread any more."""
    _unit(b, "tilerelease")


def _instruction(name, registers, addresses=0):
    """An instruction of so many registers, and then of an address and a stride."""

    def typer(context, *given):
        if not all(isinstance(kind, types.IntegerLiteral) for kind in given[:registers]):
            return None
        numbers = [ir.Constant(I8, kind.literal_value) for kind in given[:registers]]

        def generate(context, b, sig, args):
            places = (_byte_at(b, args[registers]), args[registers + 1]) if addresses else ()
            _unit(b, name, *numbers, *places)
            return context.get_dummy_value()

        return types.void(*given[:registers], *[i64t] * (2 * addresses)), generate

    return typer


@intrinsic(prefer_literal=True)
def clear_matrix(context, register):
    return _instruction("tilezero", 1)(context, register)


@intrinsic(prefer_literal=True)
def load_matrix(context, register, address, stride):
    """stride: bytes from one line to the next."""
    return _instruction("tileloadd64", 1, 1)(context, register, address, stride)


@intrinsic(prefer_literal=True)
def store_matrix(context, register, address, stride):
    return _instruction("tilestored64", 1, 1)(context, register, address, stride)


@intrinsic(prefer_literal=True)
def add_products(context, sums, left, right):
    """int32 sums += signed bytes . unsigned bytes."""
    return _instruction("tdpbsud", 3)(context, sums, left, right)


@intrinsic(prefer_literal=True)
def add_bf16_products(context, sums, left, right):
    """float32 sums += bfloat16 . bfloat16."""
    return _instruction("tdpbf16ps", 3)(context, sums, left, right)
