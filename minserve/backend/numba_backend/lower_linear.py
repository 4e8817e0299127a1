"""Lowering linear layers: with bias, residual or gate, on an input that is rounded once for all layers that read it.

Owns what is fused into a linear layer, and the norm or merge that is fused into its input's rounding. See lower.py.
"""

from __future__ import annotations

from typing import Any

from minserve.backend.base import Heads
from minserve.backend.numba_backend.attention_merge import merge_quantize
from minserve.backend.numba_backend.emitter import Emitter
from minserve.backend.numba_backend.instruction import (
    ALL,
    OWN_STRIDE,
    SCRATCH_WORDS,
    Access,
    Buffer,
    Halves,
    Offset,
    Own,
    by_columns,
    by_rows,
    for_itself,
)
from minserve.backend.numba_backend.layout import AS_BF16, AS_FLOATS, G_ROWS, P_ROWS, T_ROWS, activation_bytes, width
from minserve.backend.numba_backend.linear import LINEAR, scratch_bytes
from minserve.backend.numba_backend.linear_unit import modes, prompt_mode
from minserve.backend.numba_backend.packing import Q6_K, ROWS, Format, Matrix, Segment
from minserve.backend.numba_backend.quantize import quantize
from minserve.backend.numba_backend.recorder import Value, require
from minserve.backend.numba_backend.rows import glu as glu_rows

ACTIVATIONS = {"silu": 1, "gelu": 2}  # kinds in the kernels


def linear(e: Emitter, v: Value) -> None:
    user = e.sole_user(v)
    gated = user is not None and user.op == "glu" and v.attrs["weight"].pairs
    if not gated and not e.added_by(v):  # else computed by its user
        linear_into(e, v, v, None)


def linear_into(e: Emitter, lin: Value, v: Value, residual: Value | None) -> None:
    """The linear layer lin, and v = residual + lin where there is a residual."""
    weight: Matrix = lin.attrs["weight"]
    require(not weight.pairs, f"{weight.name}: gate and up are packed for glu only")
    out = e.in_place(residual, v) if residual else e.buffer(v)
    user = e.sole_user(v)
    heads = user.attrs["heads"] if user is not None and user.op == "rope" else None
    for segment in weight.segments:
        words: dict[str, Any] = {"out": Offset(out, segment.start), "stride": width(v.cols), "kind": 0}
        words |= {"out_mode": AS_FLOATS, "halves": 0}
        words |= {"bias": 0 if weight.bias is None else weight.bias[segment.start :]}
        words |= {"residual": Offset(e.buffer(residual), segment.start) if residual else 0}
        whole = len(weight.segments) == 1
        units = heads.q + 2 * heads.kv if heads and whole else max(1, segment.rows // ROWS)  # as rope divides them
        pattern = by_columns(v.cols, units) if whole else ("segment", segment.start)
        accesses = [Access(e.buffer(residual), pattern)] if residual else []
        accesses.append(Access(out, pattern, write=True))
        words |= {"blocks": segment.blocks, "units": units, "unit": heads.dim // ROWS if heads and whole else 1}
        _segment(e, lin.inputs[0], segment, words, accesses)


def glu(e: Emitter, v: Value) -> None:
    lin, kind = v.inputs[0], ACTIVATIONS[v.attrs["activation"]]
    if not (lin.op == "linear" and lin.attrs["weight"].pairs):
        out = e.buffer(v)
        words = {"out": out, "x": e.buffer(lin), "cols": v.cols, "stride": width(lin.cols)}
        words |= {"padded": width(v.cols), "kind": kind}
        read, write = Access(e.buffer(lin), by_rows(v.rows)), Access(out, by_rows(v.rows), write=True)
        return e.emit(glu_rows, v.rows, words, read, write)
    weight: Matrix = lin.attrs["weight"]
    (segment,) = weight.segments
    for rows, mode in _round(e, lin.inputs[0], segment.format):
        out_mode, blocks = _only_mode(e, v, rows), segment.blocks // 2
        if out_mode == AS_FLOATS:
            out = e.buffer(v)
        else:  # rounded for its only readers, linear layers of one mode, right away
            out = e.quantized[v, out_mode, rows] = Buffer(activation_bytes(width(v.cols), out_mode) * e.count(rows))
            blocks = blocks if out_mode == AS_BF16 else blocks // 2
        words = {"out": out, "stride": width(v.cols), "kind": kind, "out_mode": out_mode, "halves": Halves(out)}
        words |= {"bias": 0 if weight.bias is None else weight.bias, "residual": 0}
        words |= {"blocks": blocks, "units": blocks, "unit": 1}
        write = Access(out, by_columns(v.cols, blocks), write=True)
        _rows(e, lin.inputs[0], segment, (rows, mode), words, [write])
    return None


def _segment(e: Emitter, x: Value, segment: Segment, words: dict[str, Any], accesses: list[Access]) -> None:
    """One segment of a linear layer on the rounded x. words, accesses: what concerns the result."""
    for reading in _round(e, x, segment.format):
        _rows(e, x, segment, reading, words, accesses)


def _rows(
    e: Emitter, x: Value, segment: Segment, reading: tuple[int, int], words: dict[str, Any], accesses: list[Access]
) -> None:
    """The same for one kind of rows, rounded in one mode."""
    rows, mode = reading
    q = _rounded(e, x, mode, rows)
    q.halves |= segment.format is Q6_K
    private = q.row_bytes > 0
    words = words | {"x": q, "mode": mode, "weights": segment.data, "block_bytes": segment.block_bytes}
    words |= {"cols": width(x.cols), **SCRATCH_WORDS, "first": e.before(rows)}
    words |= {"own": Own(q) if private else 0, "own_stride": OWN_STRIDE}
    read = Access(q, for_itself(rows) if private else ALL)
    e.need_scratch(scratch_bytes(segment.format.name, mode, width(x.cols)))
    e.emit(LINEAR[segment.format.name, mode], rows, words, read, *accesses)


def _readings(e: Emitter, x: Value, form: Format) -> list[tuple[int, int]]:
    """How a linear layer with weights of this format reads x: kinds of rows, each with the mode it is rounded in.
    Generated tokens and those of prompts are two kinds only where that makes a difference."""
    mode, prompt = modes(form.name)[e.accurate], prompt_mode(form.name, accurate=e.accurate)
    if x.rows != T_ROWS or mode == prompt:
        return [(x.rows, mode)]
    return [(G_ROWS, mode), (P_ROWS, prompt)]


def _round(e: Emitter, x: Value, form: Format) -> list[tuple[int, int]]:
    """The same, all of them rounded by now: the team meets once before what reads them."""
    readings = _readings(e, x, form)
    for rows, mode in readings:
        _rounded(e, x, mode, rows)
    return readings


def _only_mode(e: Emitter, v: Value, rows: int) -> int:
    """The mode in which every reader of v wants these rows rounded, or AS_FLOATS if they don't agree."""
    if any(user.op != "linear" for user in v.users):
        return AS_FLOATS
    readers = [_readings(e, v, s.format) for user in v.users for s in user.attrs["weight"].segments]
    wanted = {dict(readings).get(rows, AS_FLOATS) for readings in readers}
    return wanted.pop() if len(wanted) == 1 else AS_FLOATS


def _rounded(e: Emitter, x: Value, mode: int, rows: int) -> Buffer:
    """Rows of the rounded x, once per mode, computing the norm or merge that produces them on the way."""
    if (x, mode, rows) not in e.quantized:
        row = activation_bytes(width(x.cols), mode)
        q = e.quantized[x, mode, rows] = Buffer(row * e.count(rows), row)
        words: dict[str, Any] = {"out": q, "mode": mode, "halves": Halves(q), **SCRATCH_WORDS}
        words |= {"own": Own(q), "own_stride": OWN_STRIDE, "first": e.before(rows)}
        write = Access(q, for_itself(rows), write=True)
        if e.gather(x)[0].op == "attention":
            _merge(e, x, rows, words, write)
        else:
            _quantize(e, x, rows, words, write)
    return e.quantized[x, mode, rows]


def _merge(e: Emitter, x: Value, rows: int, words: dict[str, Any], write: Access) -> None:
    attended, gather = e.gather(x)
    heads: Heads = attended.attrs["heads"]
    partial, slots = e.partials[attended]
    words |= {"x": e.buffer(attended), "gather": gather, "partial": partial, "slots": slots}
    words |= {"heads": heads.q, "dim": heads.dim, "window": heads.window or 0, "batch": e.batch}
    e.emit(merge_quantize, rows, words, Access(e.buffer(attended), ALL), Access(partial, ALL), write)


def _quantize(e: Emitter, x: Value, rows: int, words: dict[str, Any], write: Access) -> None:
    source, weight, eps, gather = x, 0, 0.0, 0
    if x.op == "norm" and x not in e.buffers:
        source, gather = e.gather(x.inputs[0])
        weight, eps = x.attrs["weight"], float(x.attrs["eps"])
    words |= {"x": e.buffer(source), "padded": width(x.cols), "cols": x.cols}
    words |= {"weight": weight, "eps": eps, "gather": gather}
    e.emit(quantize, rows, words, Access(e.buffer(source), ALL if gather else for_itself(rows)), write)
