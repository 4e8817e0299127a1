"""From a recorded forward pass to a list of instructions: what is fused, and which memory each result gets.

Owns the fusions, found by use counts (a value with a single user can be computed by that user), and the assignment of
buffers by liveness. It must not know how an instruction launches.

Fused: a sum into the norm that follows it (and a norm of the branch before that); `take` into the norm after it; a
bias into rope_kv; glu into the product before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from minserve.backend.base import StepLimits
from minserve.backend.cuda_backend import ops
from minserve.backend.cuda_backend.attention import Attention, Scratch
from minserve.backend.cuda_backend.kernels import DTYPES
from minserve.backend.cuda_backend.ops import Buffer, Instruction, Machine, NormWeight
from minserve.backend.cuda_backend.recorder import (
    Attended,
    Embedded,
    Gated,
    Normed,
    Product,
    Recorder,
    Rotated,
    Sum,
    Taken,
    Value,
)


@dataclass(slots=True)
class Lowered:
    """instructions, in order, and whether each works on logit rows only. logits: the output buffer [S, V] float32.
    arenas: the memory of all buffers."""

    instructions: list[tuple[Instruction, bool]]
    logits: Buffer
    arenas: list[Any]


class Lowering:
    """output: the logits. scratch: attention's, which launches look into first: empty where there will be none."""

    def __init__(self, machine: Machine, recorder: Recorder, output: Value, scratch: Scratch) -> None:
        if not isinstance(output, Product) or not output.sampled:
            raise ValueError("a forward pass must end with a linear layer on the rows of take")
        self._m, self._output, self._scratch = machine, output, scratch
        self._users, self._sole_user = recorder.users, recorder.sole_user
        self._buffers: dict[int, Buffer] = {}  # by id of the value
        self._uses: list[tuple[Instruction, list[Buffer]]] = []
        for value in recorder.values:
            self._lower(value)

    def _lower(self, value: Value) -> None:
        match value:
            case Embedded():
                self._embed(value)
            case Normed():
                self._rms_norm(value)
            case Product():
                self._linear(value)
            case Gated():
                self._glu(value)
            case Sum():
                self._add(value)
            case Rotated():
                self._rope_write_kv(value)
            case Attended():
                self._attention(value)
            case Taken():
                self._take(value)

    # -- buffers ---------------------------------------------------------------
    def _buffer(self, value: Value) -> Buffer:
        buffer = self._buffers.get(id(value))
        if buffer is None:
            kind = "float" if value.residual or value is self._output else self._m.compute
            buffer = self._buffers[id(value)] = Buffer(kind, value.cols, value.sampled)
        return buffer

    def _emit(self, instruction: Instruction, *buffers: Buffer | None) -> None:
        """buffers: what the instruction writes first, then the others that it needs."""
        self._uses.append((instruction, [buffer for buffer in buffers if buffer is not None]))

    def _narrow(self, x: Value) -> Buffer:
        """x in the compute type: products take nothing else."""
        source = self._buffer(x)
        if source.type == self._m.compute:
            return source
        out = Buffer(self._m.compute, x.cols, x.sampled)
        self._emit(ops.Cast(self._m, out, source), out, source)
        return out

    # -- fusion ----------------------------------------------------------------
    def _norm_of_sum(self, total: Value) -> Value | None:
        """The norm that computes this sum on its way, if one can."""
        residual, branch = total.inputs
        users = self._users[total]
        if not residual.residual or self._users[residual][-1] is not total or branch.residual or not users:
            return None
        user = users[0]
        if isinstance(user, Taken) and len(users) == 1:
            user = self._sole_user(user) or user
        return user if isinstance(user, Normed) else None

    def _sum_of_norm(self, norm: Value) -> Value | None:
        """The sum whose fused norm also computes this norm of its branch (Gemma's norms after a branch)."""
        total = self._sole_user(norm)
        if not isinstance(total, Sum) or total.inputs[1] is not norm or norm.inputs[0].residual:
            return None
        return total if self._norm_of_sum(total) is not None else None

    # -- one method per operation ------------------------------------------------
    def _embed(self, v: Embedded) -> None:
        out = self._buffer(v)
        self._emit(ops.Embed(self._m, out, v.table, v.scale), out)

    def _take(self, v: Taken) -> None:
        user = self._sole_user(v)
        if isinstance(user, Normed):
            return
        out, x = self._buffer(v), self._buffer(v.inputs[0])
        self._emit(ops.Take(self._m, out, x), out, x)

    def _add(self, v: Sum) -> None:
        if self._norm_of_sum(v) is not None:
            return
        residual, branch = v.inputs
        if residual.residual and self._users[residual][-1] is v:
            self._buffers[id(v)] = self._buffer(residual)
        out, a, b = self._buffer(v), self._buffer(residual), self._buffer(branch)
        self._emit(ops.Add(self._m, out, a, b), out, a, b)

    def _rms_norm(self, v: Normed) -> None:
        if self._sum_of_norm(v) is not None:
            return
        x = v.inputs[0]
        if isinstance(x, Taken) and self._sole_user(x) is v:
            x = x.inputs[0]
        branch, post = None, None
        if isinstance(x, Sum) and self._norm_of_sum(x) is v:
            residual, summand = x.inputs
            if isinstance(summand, Normed) and self._sum_of_norm(summand) is x:
                post, summand = NormWeight(summand.weight, summand.eps), summand.inputs[0]
            branch = self._buffer(summand)
            self._buffers[id(x)] = self._buffer(residual)  # the sum takes the residual's place
        out, source = self._buffer(v), self._buffer(x)
        norm = ops.Norm(self._m, out, source, NormWeight(v.weight, v.eps), branch, post)
        self._emit(norm, out, source, branch)

    def _linear(self, v: Product) -> None:
        w, user = v.weight, self._sole_user(v)
        if isinstance(user, Gated) and w.pairs and w.bias is None:
            out, x, wide = self._buffer(user), self._narrow(v.inputs[0]), Buffer(self._m.compute, v.cols, v.sampled)
            self._emit(ops.Linear(self._m, out, x, w, user.activation, wide), out, x, wide)
            return
        out, x = self._buffer(v), self._narrow(v.inputs[0])
        self._emit(ops.Linear(self._m, out, x, w), out, x)
        if w.bias is not None and not isinstance(user, Rotated):
            self._emit(ops.AddBias(self._m, out, w.bias), out)

    def _glu(self, v: Gated) -> None:
        if id(v) in self._buffers:  # the product before it did it
            return
        out, x = self._buffer(v), self._narrow(v.inputs[0])
        self._emit(ops.Glu(self._m, out, x, v.activation), out, x)

    def _rope_write_kv(self, v: Rotated) -> None:
        x = v.inputs[0]
        qkv = self._buffers[id(v)] = self._narrow(x)
        bias = x.weight.bias if isinstance(x, Product) else None
        norms = {"bias": bias, "q_norm": v.q_norm, "k_norm": v.k_norm, "eps": v.eps}
        self._emit(ops.RopeKV(self._m, qkv, v.heads, v.rope, v.cache, **norms), qkv)

    def _attention(self, v: Attended) -> None:
        out, q = self._buffer(v), self._buffer(v.inputs[0])
        self._emit(Attention(self._m, out, q, v.heads, v.cache, self._scratch), out, q)

    # -- memory ----------------------------------------------------------------
    def arenas(self, limits: StepLimits) -> tuple[list[int], list[tuple[Buffer, int]]]:
        """Bytes of each arena, and in which one each buffer lies: those that are never live together share it."""
        lives = live_ranges([buffers for _, buffers in self._uses], self._buffer(self._output))
        arenas: list[tuple[int, int]] = []  # (bytes, last use) of each
        chosen: list[tuple[Buffer, int]] = []
        for buffer, (first, last) in lives:
            size = nbytes(buffer, limits)
            free = [i for i, (_, until) in enumerate(arenas) if until < first]
            if free:  # the one that has to grow least, then the smallest
                i = min(free, key=lambda i: (max(0, size - arenas[i][0]), arenas[i][0]))
                arenas[i] = max(size, arenas[i][0]), last
            else:
                i = len(arenas)
                arenas.append((size, last))
            chosen.append((buffer, i))
        return [size for size, _ in arenas], chosen

    def finish(self, limits: StepLimits) -> Lowered:
        """Give every buffer memory."""
        sizes, chosen = self.arenas(limits)
        arenas = [self._m.cp.empty(size, np.uint8) for size in sizes]
        for buffer, i in chosen:
            numbers = arenas[i][: nbytes(buffer, limits)].view(DTYPES[buffer.type])
            buffer.array = numbers.reshape(most_rows(buffer, limits), buffer.cols)
        instructions = [(instruction, buffers[0].sampled) for instruction, buffers in self._uses]
        return Lowered(instructions, self._buffer(self._output), arenas)


def most_rows(buffer: Buffer, limits: StepLimits) -> int:
    return limits.max_rows if buffer.sampled else limits.max_tokens


def nbytes(buffer: Buffer, limits: StepLimits) -> int:
    return DTYPES[buffer.type].itemsize * buffer.cols * most_rows(buffer, limits)


def live_ranges(uses: list[list[Buffer]], output: Buffer) -> list[tuple[Buffer, tuple[int, int]]]:
    """(first, last) instruction that uses each buffer, in order of first use. The output is needed to the end."""
    ranges: dict[int, tuple[Buffer, int, int]] = {}
    for i, buffers in enumerate(uses):
        for buffer in buffers:
            _, first, _ = ranges.get(id(buffer), (buffer, i, i))
            ranges[id(buffer)] = buffer, first, i
    buffer, first, _ = ranges[id(output)]
    ranges[id(output)] = buffer, first, len(uses)
    return [(buffer, (first, last)) for buffer, first, last in ranges.values()]
