"""What a row of the tape is before memory, barriers and addresses are known: a kernel, its words, what it touches.

Owns these types, nothing else. Lowering writes them (lower.py), the tape reads them (tape.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minserve.backend.numba_backend.jit import Kernel
from minserve.backend.numba_backend.recorder import LayerCache


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory for one value. row_bytes > 0: quantized rows, of which each thread has a copy of its own for one row.

    halves: some Q6_K matrix reads these quantized rows, and wants sums per 16.
    """

    nbytes: int
    row_bytes: int = 0
    slot: int = -1
    halves: bool = False


@dataclass(frozen=True, slots=True)
class Own:
    """Stands for the address of the threads' own copies of a buffer's only row."""

    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Halves:
    """Stands for a buffer's `halves`, which later instructions may set."""

    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Offset:
    """A column of a buffer of floats."""

    buffer: Buffer
    column: int


class Marker:
    """A word that is known once everything is lowered."""


SCRATCH, SCRATCH_STRIDE, OWN_STRIDE = Marker(), Marker(), Marker()
SCRATCH_WORDS = {"scratch": SCRATCH, "scratch_stride": SCRATCH_STRIDE}

# How the threads of a team divide what an instruction touches. Two accesses with equal patterns, other than ALL, of one
# buffer meet only data of the same thread. by_rows: rows (T or S); by_columns: by blocks of 16 columns, in equal units.
ALL = ("all",)


def by_rows(rows: int) -> tuple[Any, ...]:
    return ("rows", rows)


def by_columns(cols: int, units: int) -> tuple[Any, ...]:
    return ("columns", cols, units)


def for_itself(rows: int) -> tuple[Any, ...]:
    """By rows, but a single row is handled by every thread for itself."""
    return ("itself", rows)


def alone(rows: int, pattern: tuple[Any, ...]) -> tuple[Any, ...]:
    """A single row by this pattern, several by rows whose tokens share no block of the KV cache."""
    return ("alone", rows, pattern)


@dataclass(frozen=True, slots=True)
class Access:
    memory: Buffer | LayerCache
    pattern: tuple[Any, ...]
    write: bool = False


@dataclass(slots=True)
class Instruction:
    """A row of the tape: a kernel, which count of rows it gets, its words by name, what it touches."""

    kernel: Kernel
    rows: int
    words: dict[str, Any]
    accesses: list[Access] = field(default_factory=list)
