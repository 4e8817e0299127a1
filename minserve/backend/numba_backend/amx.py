"""Intel AMX: the processor's matrix unit multiplies 16 tokens with 16 rows of weights in one instruction.

Owns the unit's registers: their shapes, and how operands get in and products out. It must not know formats or scales.

Registers: sums of a tile of tokens, int32 [R][16 rows]; its tokens, int8 [R][k]; weights, uint8 [k / 4][16 rows][4].
A tile has 16 tokens or 8: its R is that of the tuple `shape`. A tile's rows beyond the last token multiply whatever
lies there; nobody reads these sums. Products are integers, the same to the bit as those of dot.py. With bfloat16, sums
are float32, 32 k at a time, and up to four tiles of tokens share weights: as many as `shape` is long.

Linux hands the unit's registers out on request: once, for all threads of the process.
Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, misc"

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from minserve.backend.numba_backend.jit import cpu_has, may_use_amx
from minserve.backend.numba_backend.simd_types import (
    I8,
    I16,
    I64,
    call,
    constant,
    i64t,
    op,
    pointer,
    store,
    u4x64,
    u8x64,
)
from minserve.backend.numba_backend.tile import vectors

HAS_AMX = all(cpu_has(feature) for feature in ("amx-tile", "amx-int8", "amx-bf16")) and may_use_amx()

REGISTERS = {16: (0, 1), 8: (2, 3)}  # by R: of sums, and of tokens
WEIGHTS = 4
BF16_SUMS, BF16_TOKENS, BF16_WEIGHTS = (0, 1, 2, 3), (4, 5), 6


def _unit(b, name, *args):
    call(b, f"llvm.x86.{name}", ir.VoidType(), *args)


def _register(number):
    return ir.Constant(I8, number)


def _room(b, nbytes):
    with b.goto_entry_block():  # unlike numba's own, not filled with zeros at every call
        place = b.alloca(ir.ArrayType(I8, nbytes))
    place.align = 64
    return b.ptrtoint(place, I64)


@op(types.void, i64t)
def begin_matrices(b, k):
    """Shapes for tokens of k bytes: 16 to 64, a multiple of 16. Before the first of what follows; ends with
    end_matrices."""
    shapes = {WEIGHTS: (b.lshr(k, ir.Constant(I64, 2)), ir.Constant(I64, 64))}
    for rows, (sums, tokens) in REGISTERS.items():
        shapes |= {sums: (ir.Constant(I64, rows), ir.Constant(I64, 64)), tokens: (ir.Constant(I64, rows), k)}
    _configure(b, shapes)


@op(types.void, i64t)
def begin_bf16_matrices(b, rows):
    """Shapes for bfloat16, tiles of so many tokens: 1 to 16."""
    line = ir.Constant(I64, 64)
    _configure(
        b, dict.fromkeys((*BF16_SUMS, *BF16_TOKENS), (rows, line)) | {BF16_WEIGHTS: (ir.Constant(I64, 16), line)}
    )


def _configure(b, shapes):
    """shapes: register -> rows, and bytes of a row."""
    at = _room(b, 64)
    for word in range(8):
        store(b, ir.Constant(I64, int(word == 0)), at, ir.Constant(I64, word), I64)  # palette 1
    for register, (rows, nbytes) in shapes.items():
        store(b, b.trunc(nbytes, I16), at, ir.Constant(I64, 8 + register), I16)
        store(b, b.trunc(rows, I8), at, ir.Constant(I64, 48 + register), I8)
    _unit(b, "ldtilecfg", pointer(b, at, ir.Constant(I64, 0), I8))


@op(types.void)
def end_matrices(b):
    """The system need not save the unit's registers for this thread any more."""
    _unit(b, "tilerelease")


@intrinsic
def matrix_products(context, shape, weights, tokens, stride, out):
    """out [R][16] int32 = tokens [R][k] . weights; stride: bytes from token to token."""

    def generate(context, b, sig, args):
        _, *places, stride, out = args
        sums, tokens = (_register(number) for number in REGISTERS[sig.args[0].count])
        line, zero = ir.Constant(I64, 64), ir.Constant(I64, 0)
        weights_at, tokens_at, out_at = (pointer(b, place, zero, I8) for place in (*places, out))
        _unit(b, "tilezero", sums)
        _unit(b, "tileloadd64", _register(WEIGHTS), weights_at, line)
        _unit(b, "tileloadd64", tokens, tokens_at, stride)
        _unit(b, "tdpbsud", sums, tokens, _register(WEIGHTS))
        _unit(b, "tilestored64", sums, out_at, line)
        return context.get_dummy_value()

    return types.void(shape, i64t, i64t, i64t, i64t), generate


@intrinsic
def bf16_clear(context, shape):
    """Sums of as many tiles as `shape` is long := 0."""

    def generate(context, b, sig, args):
        for register in BF16_SUMS[: shape.count]:
            _unit(b, "tilezero", _register(register))
        return context.get_dummy_value()

    return types.void(shape), generate


@intrinsic
def bf16_add(context, shape, weights, tokens):
    """sums += tokens . weights, 32 k; tokens [tiles][16][32], weights [16 pairs of k][16 rows][2], bfloat16."""

    def generate(context, b, sig, args):
        _, weights, tokens = args
        line = ir.Constant(I64, 64)
        _unit(b, "tileloadd64", _register(BF16_WEIGHTS), pointer(b, weights, ir.Constant(I64, 0), I8), line)
        for i, register in enumerate(BF16_SUMS[: shape.count]):
            tile = _register(BF16_TOKENS[i % 2])
            _unit(b, "tileloadd64", tile, pointer(b, tokens, ir.Constant(I64, i * 16 * 64), I8), line)
            _unit(b, "tdpbf16ps", _register(register), tile, _register(BF16_WEIGHTS))
        return context.get_dummy_value()

    return types.void(shape, i64t, i64t), generate


@intrinsic
def bf16_store(context, shape, out):
    """out [tiles][16][16] = sums."""

    def generate(context, b, sig, args):
        for i, register in enumerate(BF16_SUMS[: shape.count]):
            at = pointer(b, args[1], ir.Constant(I64, i * 16 * 64), I8)
            _unit(b, "tilestored64", _register(register), at, ir.Constant(I64, 64))
        return context.get_dummy_value()

    return types.void(shape, i64t), generate


# -- operands in memory


@intrinsic(prefer_literal=True)
def room(context, nbytes):
    """Address of so many bytes of the kernel's stack; nbytes must be a literal."""
    if not isinstance(nbytes, types.IntegerLiteral):
        return None

    def generate(context, b, sig, args):
        return _room(b, nbytes.literal_value)

    return i64t(nbytes), generate


@intrinsic
def store_weights(context, weights, out):
    """A tuple of Bytes, one after the other."""

    def generate(context, b, sig, args):
        for i, v in enumerate(vectors(b, sig.args[0], args[0])):
            store(b, v, args[1], ir.Constant(I64, 64 * i), I8)
        return context.get_dummy_value()

    return types.void(weights, i64t), generate


@op(u8x64, u4x64)
def times_16(b, v):
    return b.shl(v, constant(I8, 64, 4))
