"""From recorded values to kernel calls: which kernel computes what, and what is fused into its neighbour.

Owns the fusion rules, which are nothing but use counts: a value with one user is computed by that user where a kernel
can. It must not know where buffers lie or how threads meet (tape.py). Fused are
    norm, or the merge of attention's partial results, into the rounding of a linear layer's input
    bias, residual and gate into the linear layer
    post-norms into the addition of the residual
    take into the norm that follows it
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from minserve.backend.base import BackendError, Heads, StepLimits
from minserve.backend.numba_backend import attention, embed, linear, quantize, rope, sampling
from minserve.backend.numba_backend.jit import Kernel
from minserve.backend.numba_backend.layout import (
    BLOCK,
    CHUNK,
    LOGIT_ROWS,
    T_ROWS,
    TILE,
    activation_bytes,
    width,
)
from minserve.backend.numba_backend.packing import Q6_K, ROWS, Format, Matrix, Segment
from minserve.backend.numba_backend.recorder import LayerCache, Value, require

KINDS = {"silu": 1, "gelu": 2}
LOG2_E = math.log2(math.e)


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


class Lowering:
    """Instructions, in order, for a list of recorded values. `out` is the buffer of the last one."""

    def __init__(
        self, values: Sequence[Value], limits: StepLimits, batch: npt.NDArray[np.int64], accurate: bool
    ) -> None:
        self.limits, self.batch, self.accurate = limits, batch, accurate
        self.result = values[-1]
        self.instructions: list[Instruction] = []
        self.buffers: dict[Value, Buffer] = {}
        self.quantized: dict[tuple[Value, int], Buffer] = {}
        self.partials: dict[Value, tuple[Buffer, int]] = {}
        self.scratch_bytes = max(4 * TILE * 64, max(width(v.cols) for v in values) * 4)
        self.mask = _masks()
        for value in values:
            getattr(self, "_" + value.op)(value)
        self.out = self.buffers[self.result]

    def sample(self, vocab: int, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Draw a token from each row of the result. arrays: the fields of sample_rows that the host fills."""
        padded = width(vocab)
        self.scratch_bytes = max(self.scratch_bytes, sampling.scratch_bytes(padded))
        words: dict[str, Any] = {"logits": self.out, "vocab": vocab, "padded": padded, **arrays}
        words |= {"scratch": SCRATCH, "scratch_stride": SCRATCH_STRIDE}
        pattern = by_rows(self.result.rows)
        access = Access(self.out, pattern), Access(self.out, pattern, write=True)
        self._emit(sampling.sample_rows, self.result.rows, words, *access)

    # -- helpers

    def _count(self, rows: int) -> int:
        return self.limits.max_tokens if rows == T_ROWS else self.limits.max_rows

    def _buffer(self, value: Value) -> Buffer:
        if value not in self.buffers:
            self.buffers[value] = Buffer(self._count(value.rows) * width(value.cols) * 4)
        return self.buffers[value]

    def _in_place(self, old: Value, new: Value) -> Buffer:
        """The buffer of `new`, which is that of `old` if nobody reads it later."""
        if old.users[-1] is new:
            self.buffers[new] = self._buffer(old)
        return self._buffer(new)

    def _sole_user(self, value: Value) -> Value | None:
        return value.users[0] if len(value.users) == 1 and value is not self.result else None

    def _emit(self, kernel: Kernel, rows: int, words: dict[str, Any], *accesses: Access) -> None:
        require(set(words) == set(kernel.fields), f"{kernel.name}: words {sorted(words)}, fields {kernel.fields}")
        self.instructions.append(Instruction(kernel, rows, words, list(accesses)))

    def _gather(self, value: Value) -> tuple[Value, Any]:
        """Look through a take that isn't computed: the value to read and the address of the row numbers, or 0."""
        if value.op == "take" and value not in self.buffers:
            return value.inputs[0], int(self.batch[LOGIT_ROWS])
        return value, 0

    # -- one method per operation

    def _embed(self, v: Value) -> None:
        table: Matrix = v.attrs["table"]
        require(len(table.segments) == 1, f"{table.name} mixes encodings")
        (segment,) = table.segments
        words = {"out": self._buffer(v), "table": segment.data, "block_bytes": segment.block_bytes}
        words |= {"padded": width(v.cols), "scale": float(v.attrs["scale"]), "batch": self.batch}
        kernel = embed.EMBED[segment.format.name]
        self._emit(kernel, v.rows, words, Access(self._buffer(v), by_rows(v.rows), write=True))

    def _take(self, v: Value) -> None:
        (x,) = v.inputs
        fused = "linear" if x.op == "attention" else "norm"
        if all(user.op == fused for user in v.users) and v is not self.result:
            return  # computed by the norms, or where attention's result is merged and rounded
        words = {"out": self._buffer(v), "x": self._buffer(x), "padded": width(v.cols)}
        words |= {"gather": int(self.batch[LOGIT_ROWS])}
        read = Access(self._buffer(x), ALL)
        self._emit(quantize.take, v.rows, words, read, Access(self._buffer(v), by_rows(v.rows), write=True))

    def _norm(self, v: Value) -> None:
        if v.users and all(user.op == "linear" for user in v.users):
            return  # computed where the linear layers' input is rounded
        user = self._sole_user(v)
        if user is not None and user.op == "add" and user.inputs[1] is v and user.inputs[0] is not v:
            return  # computed by the addition
        self._norm_into(v, self._buffer(v), v.rows, None)

    def _norm_into(self, norm: Value, out: Buffer, rows: int, residual: Value | None) -> None:
        x, gather = self._gather(norm.inputs[0])
        words: dict[str, Any] = {"out": out, "x": self._buffer(x), "padded": width(norm.cols), "cols": norm.cols}
        words |= {"weight": norm.attrs["weight"], "eps": float(norm.attrs["eps"]), "gather": gather}
        words |= {"residual": self._buffer(residual) if residual else 0}
        accesses = [Access(self._buffer(x), ALL if gather else by_rows(rows))]
        if residual:
            accesses.append(Access(self._buffer(residual), by_rows(rows)))
        self._emit(quantize.norm, rows, words, *accesses, Access(out, by_rows(rows), write=True))

    def _add(self, v: Value) -> None:
        residual, branch = v.inputs
        if self._sole_user(branch) is v and residual is not branch:
            if branch.op == "linear":
                return self._linear_into(branch, v, residual)
            if branch.op == "norm":
                return self._norm_into(branch, self._in_place(residual, v), v.rows, residual)
        words = {
            "out": self._buffer(v),
            "a": self._buffer(residual),
            "b": self._buffer(branch),
            "padded": width(v.cols),
        }
        reads = [Access(self._buffer(x), by_rows(v.rows)) for x in v.inputs]
        return self._emit(quantize.add, v.rows, words, *reads, Access(self._buffer(v), by_rows(v.rows), write=True))

    def _linear(self, v: Value) -> None:
        user = self._sole_user(v)
        if user is not None and user.op == "add" and user.inputs[1] is v and user.inputs[0] is not v:
            return
        if user is not None and user.op == "glu" and v.attrs["weight"].pairs:
            return
        self._linear_into(v, v, None)

    def _linear_into(self, lin: Value, v: Value, residual: Value | None) -> None:
        weight: Matrix = lin.attrs["weight"]
        require(not weight.pairs, f"{weight.name}: gate and up are packed for glu only")
        out = self._in_place(residual, v) if residual else self._buffer(v)
        user = self._sole_user(v)
        heads = user.attrs["heads"] if user is not None and user.op == "rope" else None
        for segment in weight.segments:
            words: dict[str, Any] = {"out": Offset(out, segment.start), "stride": width(v.cols), "kind": 0}
            words |= {"out_mode": 0, "halves": 0}
            words |= {"bias": 0 if weight.bias is None else weight.bias[segment.start :]}
            words |= {"residual": Offset(self._buffer(residual), segment.start) if residual else 0}
            whole = len(weight.segments) == 1
            units = heads.q + 2 * heads.kv if heads and whole else max(1, segment.rows // ROWS)  # as rope divides them
            pattern = by_columns(v.cols, units) if whole else ("segment", segment.start)
            accesses = [Access(self._buffer(residual), pattern)] if residual else []
            accesses.append(Access(out, pattern, write=True))
            words |= {"blocks": segment.blocks, "units": units, "unit": heads.dim // ROWS if heads and whole else 1}
            self._matrix(lin.inputs[0], segment, lin.rows, words, accesses)

    def _glu(self, v: Value) -> None:
        lin, kind = v.inputs[0], KINDS[v.attrs["activation"]]
        if not (lin.op == "linear" and lin.attrs["weight"].pairs):
            out = self._buffer(v)
            words = {"out": out, "x": self._buffer(lin), "cols": v.cols, "stride": width(lin.cols)}
            words |= {"padded": width(v.cols), "kind": kind}
            read, write = Access(self._buffer(lin), by_rows(v.rows)), Access(out, by_rows(v.rows), write=True)
            return self._emit(quantize.glu, v.rows, words, read, write)
        weight: Matrix = lin.attrs["weight"]
        (segment,) = weight.segments
        blocks, mode = segment.blocks // 2, self._only_mode(v)
        if mode:  # integers: rounded for its only readers, linear layers of one mode, right away
            out = self.quantized[v, mode] = Buffer(activation_bytes(width(v.cols), mode) * self._count(v.rows))
            blocks //= 2
        else:
            out, mode = self._buffer(v), 0
        words = {"out": out, "stride": width(v.cols), "kind": kind, "out_mode": mode, "halves": Halves(out)}
        words |= {"bias": 0 if weight.bias is None else weight.bias, "residual": 0}
        write = Access(out, by_columns(v.cols, blocks), write=True)
        words |= {"blocks": blocks, "units": blocks, "unit": 1}
        return self._matrix(lin.inputs[0], segment, v.rows, words, [write])

    def _mode(self, form: Format) -> int:
        """What a linear layer with weights of this format reads."""
        return linear.modes(form.name)[self.accurate]

    def _only_mode(self, v: Value) -> int | None:
        """The mode in which every reader of v wants it rounded, if they agree."""
        if any(user.op != "linear" for user in v.users):
            return None
        modes = {self._mode(segment.format) for user in v.users for segment in user.attrs["weight"].segments}
        return modes.pop() if len(modes) == 1 else None

    def _matrix(
        self,
        x: Value,
        segment: Segment,
        rows: int,
        words: dict[str, Any],
        accesses: list[Access],
    ) -> None:
        """One segment of a linear layer on the rounded x."""
        mode = self._mode(segment.format)
        q = self._quantize(x, mode)
        q.halves |= segment.format is Q6_K
        private = q.row_bytes > 0
        words = words | {"x": q, "mode": mode, "weights": segment.data, "block_bytes": segment.block_bytes}
        words |= {"cols": width(x.cols)}
        words |= {"scratch": SCRATCH, "scratch_stride": SCRATCH_STRIDE}
        words |= {"own": Own(q) if private else 0, "own_stride": OWN_STRIDE}
        kernel = linear.LINEAR[segment.format.name, mode]
        self._emit(kernel, rows, words, Access(q, for_itself(rows) if private else ALL), *accesses)

    def _quantize(self, x: Value, mode: int) -> Buffer:
        """The rounded x, once per mode, computing the norm or merge that produces it on the way."""
        if (x, mode) in self.quantized:
            return self.quantized[x, mode]
        row = activation_bytes(width(x.cols), mode)
        q = self.quantized[x, mode] = Buffer(row * self._count(x.rows), row)
        words: dict[str, Any] = {"out": q, "mode": mode, "halves": Halves(q), "own": Own(q), "own_stride": OWN_STRIDE}
        words |= {"scratch": SCRATCH, "scratch_stride": SCRATCH_STRIDE}
        write = Access(q, for_itself(x.rows), write=True)
        attended, gather = self._gather(x)
        if attended.op == "attention":
            heads: Heads = attended.attrs["heads"]
            partial, slots = self.partials[attended]
            words |= {
                "x": self._buffer(attended),
                "gather": gather,
                "partial": partial,
                "slots": slots,
                "heads": heads.q,
                "dim": heads.dim,
            }
            words |= {"window": heads.window or 0, "batch": self.batch}
            reads = Access(self._buffer(attended), ALL), Access(partial, ALL)
            self._emit(quantize.merge_quantize, x.rows, words, *reads, write)
            return q
        source, weight, eps, gather = x, 0, 0.0, 0
        if x.op == "norm" and x not in self.buffers:
            source, gather = self._gather(x.inputs[0])
            weight, eps = x.attrs["weight"], float(x.attrs["eps"])
        words |= {"x": self._buffer(source), "padded": width(x.cols), "cols": x.cols}
        words |= {"weight": weight, "eps": eps, "gather": gather}
        read = Access(self._buffer(source), ALL if gather else for_itself(x.rows))
        self._emit(quantize.quantize, x.rows, words, read, write)
        return q

    def _rope(self, v: Value) -> None:
        a, heads, (qkv,) = v.attrs, v.attrs["heads"], v.inputs
        buffer = self.buffers[v] = self._buffer(qkv)
        cache: LayerCache = a["cache"]
        words = {"qkv": buffer, "heads": heads.q, "kv_heads": heads.kv, "dim": heads.dim, "stride": width(v.cols)}
        words |= {"cos": a["rope"].cos, "sin": a["rope"].sin, "half": a["rope"].half}
        words |= {"cache": cache.words, "blocks": cache.blocks, "batch": self.batch, "eps": float(a["eps"])}
        words |= {name: 0 if a[name] is None else a[name] for name in ("q_norm", "k_norm")}
        words |= {"scratch": SCRATCH, "scratch_stride": SCRATCH_STRIDE}
        pattern = by_columns(v.cols, heads.q + 2 * heads.kv)
        accesses = Access(buffer, pattern), Access(buffer, pattern, write=True), Access(cache, pattern, write=True)
        self._emit(rope.rope_write_kv, v.rows, words, *accesses)

    def _attention(self, v: Value) -> None:
        heads: Heads = v.attrs["heads"]
        cache: LayerCache = v.attrs["cache"]
        (q,) = v.inputs
        group = heads.q // heads.kv
        if group > attention.MOST_GROUP:
            raise BackendError(f"{group} query heads per kv head, this backend computes up to {attention.MOST_GROUP}")
        slots = -(-self.limits.max_model_len // (BLOCK * CHUNK))
        partial = Buffer(self.limits.max_requests * heads.q * slots * (heads.dim + 16) * 4)
        self.partials[v] = partial, slots
        self.scratch_bytes = max(self.scratch_bytes, attention.scratch_bytes(group, heads.dim))
        out = self.buffers[v] = Buffer(self._count(v.rows) * v.cols * 4)
        words = {"out": out, "qkv": self._buffer(q), "partial": partial, "slots": slots, "heads": heads.q}
        words |= {"kv_heads": heads.kv, "dim": heads.dim, "cache": cache.words, "blocks": cache.blocks}
        words |= {"batch": self.batch, "mask": self.mask, "scale": heads.scale * LOG2_E}
        words |= {"scratch": SCRATCH, "scratch_stride": SCRATCH_STRIDE, "softcap": (heads.softcap or 0) * LOG2_E}
        words |= {"stride": width(q.cols), "window": heads.window or 0}
        reads = Access(self._buffer(q), ALL), Access(cache, ALL)
        one, many = attention.tile_rows(group)
        shared = ("requests",)  # the two kernels write the rows of different requests: no barrier between them
        for kernel, rows in ((attention.ONES[one], one), (attention.MANY[many], many)):
            writes = Access(out, shared, write=True), Access(partial, shared, write=True)
            self._emit(kernel, v.rows, words | {"tile": rows // group, "tile_rows": rows}, *reads, *writes)


def _masks() -> npt.NDArray[np.float32]:
    """[2, 17, 16]: what is added to a block's scores to hide all but the first n keys, and the first n keys."""
    lanes, n = np.arange(BLOCK), np.arange(BLOCK + 1)[:, None]
    return np.where(np.stack([lanes < n, lanes >= n]), 0, -1e30).astype(np.float32)
