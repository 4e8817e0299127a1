"""What lowering has come to so far: the instructions, and which buffer holds which value.

Owns these and the step's limits. It must not know which kernel computes what (the lower modules), nor where buffers
lie or how threads meet (tape.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from minserve.backend.base import StepLimits
from minserve.backend.numba_backend.instruction import Access, Buffer, Instruction
from minserve.backend.numba_backend.jit import Kernel
from minserve.backend.numba_backend.layout import G_ROWS, HEADER, LOGIT_ROWS, P_ROWS, S_ROWS, width
from minserve.backend.numba_backend.recorder import Value, require


class Emitter:
    """result: the value wanted in the end. batch: the words of layout's batch block. accurate: how linear layers' input
    is rounded. scratch_bytes: what the neediest instruction takes."""

    def __init__(self, result: Value, limits: StepLimits, batch: npt.NDArray[np.int64], accurate: bool) -> None:
        self.result, self.limits, self.batch, self.accurate = result, limits, batch, accurate
        self.instructions: list[Instruction] = []
        self.buffers: dict[Value, Buffer] = {}
        self.quantized: dict[tuple[Value, int, int], Buffer] = {}  # by value, mode and kind of rows
        self.partials: dict[Value, tuple[Buffer, int]] = {}  # of attention, and how many a head of a request can have
        self.scratch_bytes = 0

    @property
    def out(self) -> Buffer:
        return self.buffers[self.result]

    def count(self, rows: int) -> int:
        """The most rows of this kind."""
        return self.limits.max_rows if rows == S_ROWS else self.limits.max_tokens

    def before(self, rows: int) -> int:
        """The address of how many rows of a value come before those of this kind, or 0: tokens of prompts are last."""
        return int(self.batch[HEADER]) + 8 * G_ROWS if rows == P_ROWS else 0

    def buffer(self, value: Value) -> Buffer:
        if value not in self.buffers:
            self.buffers[value] = Buffer(self.count(value.rows) * width(value.cols) * 4)
        return self.buffers[value]

    def in_place(self, old: Value, new: Value) -> Buffer:
        """The buffer of `new`, which is that of `old` if nobody reads it later."""
        if old.users[-1] is new:
            self.buffers[new] = self.buffer(old)
        return self.buffer(new)

    def sole_user(self, value: Value) -> Value | None:
        return value.users[0] if len(value.users) == 1 and value is not self.result else None

    def added_by(self, value: Value) -> bool:
        """Whether value is nothing but the branch of an addition, which may then compute it."""
        user = self.sole_user(value)
        return user is not None and user.op == "add" and user.inputs[1] is value and user.inputs[0] is not value

    def gather(self, value: Value) -> tuple[Value, Any]:
        """Look through a take that isn't computed: the value to read and the address of the row numbers, or 0."""
        if value.op == "take" and value not in self.buffers:
            return value.inputs[0], int(self.batch[LOGIT_ROWS])
        return value, 0

    def need_scratch(self, nbytes: int) -> None:
        self.scratch_bytes = max(self.scratch_bytes, nbytes)

    def emit(self, kernel: Kernel, rows: int, words: dict[str, Any], *accesses: Access) -> None:
        require(set(words) == set(kernel.fields), f"{kernel.name}: words {sorted(words)}, fields {kernel.fields}")
        self.instructions.append(Instruction(kernel, rows, words, list(accesses)))
