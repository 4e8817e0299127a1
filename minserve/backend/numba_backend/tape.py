"""The tape: instructions given memory, barriers and machine addresses; what a team of threads replays every step.

Owns buffers (by liveness), barriers (by access pattern) and the int64 rows. It must not know what kernels compute.

Row: [kernel address, barrier bits, word of the header that counts its rows, parameters...]. Bit b of the barrier word
says whether the team meets before this row in steps of kind b = (T > 1) + 2 (S > 1).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from minserve.backend.numba_backend.arena import Bytes, aligned
from minserve.backend.numba_backend.emitter import Emitter
from minserve.backend.numba_backend.instruction import (
    ALL,
    OWN_STRIDE,
    SCRATCH,
    SCRATCH_STRIDE,
    Access,
    Buffer,
    Halves,
    Instruction,
    Offset,
    Own,
)
from minserve.backend.numba_backend.layout import G_ROWS, LINE, P_ROWS, S_ROWS, SLACK, T_ROWS

WIDTH = 24  # words per row: three cache lines
HEAD = 3  # words before the parameters
KINDS = 4  # of steps


class Tape:
    """rows: int64 [n * WIDTH] for n instructions. Holds every array whose address stands in it."""

    def __init__(self, lowered: Emitter, threads: int) -> None:
        self.instructions = lowered.instructions
        self.out = lowered.out
        self._threads = threads
        self._keep: list[Any] = []
        self._assign_slots()
        self.barriers = place_barriers(self.instructions)
        self._allocate(lowered)
        self.rows = self._assemble()

    def _assign_slots(self) -> None:
        """Linear scan (Poletto, Sarkar 1999): a slot is free again after the last instruction that touches its buffer.

        Quantized rows have slots of their own: the threads' private copies must not lie where others write.
        """
        first: dict[Buffer, int] = {}
        last: dict[Buffer, int] = {}
        for i, instruction in enumerate(self.instructions):
            for access in instruction.accesses:
                if isinstance(access.memory, Buffer):
                    first.setdefault(access.memory, i)
                    last[access.memory] = i
        last[self.out] = len(self.instructions)
        self.slots: list[list[int]] = []  # [bytes, bytes of a private row]
        free: list[int] = []
        live: list[Buffer] = []
        for i in range(len(self.instructions)):
            for buffer in [b for b in live if last[b] < i]:
                live.remove(buffer)
                free.append(buffer.slot)
            for buffer in [b for b, start in first.items() if start == i]:
                self._choose(buffer, free)
                live.append(buffer)

    def _choose(self, buffer: Buffer, free: list[int]) -> None:
        """The free slot that has to grow least, then the smallest."""
        private = buffer.row_bytes > 0
        fitting = [s for s in free if (self.slots[s][1] > 0) == private]
        if fitting:
            slot = min(fitting, key=lambda s: (max(0, buffer.nbytes - self.slots[s][0]), self.slots[s][0]))
            free.remove(slot)
        else:
            slot = len(self.slots)
            self.slots.append([0, 0])
        buffer.slot = slot
        self.slots[slot] = [max(self.slots[slot][0], buffer.nbytes), max(self.slots[slot][1], buffer.row_bytes)]

    def _allocate(self, lowered: Emitter) -> None:
        pieces = [aligned(nbytes + SLACK, 4096) for nbytes, _ in self.slots]
        self.memory = pieces
        self.nbytes = sum(p.nbytes for p in pieces)
        self._keep.append(pieces)
        self._addresses = [p.ctypes.data for p in pieces]
        self._own_stride = _lines(max((row for _, row in self.slots), default=0))
        self._own = [self._per_thread(self._own_stride) if row else 0 for _, row in self.slots]
        self._scratch_stride = _lines(lowered.scratch_bytes)
        self._scratch = self._per_thread(self._scratch_stride)

    def _per_thread(self, stride: int) -> int:
        piece = aligned(stride * self._threads)
        self._keep.append(piece)
        return piece.ctypes.data

    def _assemble(self) -> npt.NDArray[np.int64]:
        rows = aligned(len(self.instructions) * WIDTH * 8 + 3 * LINE).view(np.int64)  # the interpreter prefetches ahead
        for i, (instruction, bits) in enumerate(zip(self.instructions, self.barriers, strict=True)):
            words = [instruction.kernel.address, bits, instruction.rows]
            words += [self._word(instruction.words[name]) for name in instruction.kernel.fields]
            rows[i * WIDTH : i * WIDTH + len(words)] = words
        return rows

    def _word(self, value: Any) -> int:
        if isinstance(value, float):
            return int.from_bytes(struct.pack("=d", value), byteorder=_ORDER, signed=True)
        if isinstance(value, Buffer):
            return self._addresses[value.slot]
        if isinstance(value, Offset):
            return self._addresses[value.buffer.slot] + 4 * value.column
        if isinstance(value, Halves):
            return int(value.buffer.halves)
        if isinstance(value, Own):
            return self._own[value.buffer.slot]
        if isinstance(value, np.ndarray):
            self._keep.append(value)
            return int(value.ctypes.data)
        markers = {SCRATCH: self._scratch, SCRATCH_STRIDE: self._scratch_stride, OWN_STRIDE: self._own_stride}
        return int(markers.get(value, value))

    def view(self, buffer: Buffer, rows: int, width: int) -> npt.NDArray[np.float32]:
        """A buffer of floats as an array."""
        flat: Bytes = self.memory[buffer.slot][: rows * width * 4]
        return flat.view(np.float32).reshape(rows, width)


_ORDER: Any = "little" if struct.pack("=h", 1) == b"\x01\x00" else "big"


def _lines(nbytes: int) -> int:
    """Whole lines, and one more: private memory of two threads never shares one, nor meets in a prefetch."""
    return -(-nbytes // LINE) * LINE + LINE


def place_barriers(instructions: Sequence[Instruction]) -> list[int]:
    """Barrier bits per instruction, for each kind of step: the team must meet before an access that conflicts with
    one since the last meeting, that is, one of the two writes and they may touch data of different threads."""
    bits = [0] * len(instructions)
    for kind in range(KINDS):
        single = {S_ROWS: not kind & 2} | dict.fromkeys((T_ROWS, G_ROWS, P_ROWS), not kind & 1)
        since: dict[object, list[tuple[Any, bool]]] = {}
        for i, instruction in enumerate(instructions):
            touched = [(_memory(a), (a.memory, _resolve(a, single)), a.write) for a in instruction.accesses]
            if any(_conflict(use, write, since.get(memory, ())) for memory, use, write in touched):
                bits[i] |= 1 << kind
                since = {}
            for memory, use, write in touched:
                since.setdefault(memory, []).append((use, write))
    return bits


def _memory(access: Access) -> object:
    """What can alias: buffers in one slot do."""
    return access.memory.slot if isinstance(access.memory, Buffer) else access.memory


def _conflict(use: Any, write: bool, earlier: Sequence[tuple[Any, bool]]) -> bool:
    return any((write or wrote) and not (use == other and use[1] != ALL) for other, wrote in earlier)


def _resolve(access: Access, single: dict[int, bool]) -> tuple[Any, ...]:
    """The pattern in a step where these kinds of rows are single."""
    if access.pattern[0] == "alone":
        _, rows, pattern = access.pattern
        return pattern if single[rows] else ("blocks", rows)
    if access.pattern[0] != "itself":
        return access.pattern
    rows = access.pattern[1]
    quantized = isinstance(access.memory, Buffer) and access.memory.row_bytes > 0
    if single[rows]:
        return access.pattern if quantized else ALL  # private copies; but what they are made of, everybody reads
    if not quantized and rows != T_ROWS:
        return ALL  # of several tokens one may be single of its kind, which every thread reads for itself
    return ("rows", rows) if access.write or not quantized else ALL  # a linear layer reads all rows
