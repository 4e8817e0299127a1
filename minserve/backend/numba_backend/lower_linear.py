"""Lowering linear layers: with bias, residual or gate, on an input that is rounded once for all layers that read it.

Owns what is fused into a linear layer, and the norm or merge that is fused into its input's rounding. See lower.py.
"""

from __future__ import annotations

from typing import Any

from minserve.backend.base import Heads
from minserve.backend.numba_backend import rows
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
from minserve.backend.numba_backend.layout import activation_bytes, width
from minserve.backend.numba_backend.linear import LINEAR, modes
from minserve.backend.numba_backend.packing import Q6_K, ROWS, Format, Matrix, Segment
from minserve.backend.numba_backend.quantize import quantize
from minserve.backend.numba_backend.recorder import Value, require

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
        words |= {"out_mode": 0, "halves": 0}
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
        return e.emit(rows.glu, v.rows, words, read, write)
    weight: Matrix = lin.attrs["weight"]
    (segment,) = weight.segments
    blocks, mode = segment.blocks // 2, _only_mode(e, v)
    if mode:  # integers: rounded for its only readers, linear layers of one mode, right away
        out = e.quantized[v, mode] = Buffer(activation_bytes(width(v.cols), mode) * e.count(v.rows))
        blocks //= 2
    else:
        out, mode = e.buffer(v), 0
    words = {"out": out, "stride": width(v.cols), "kind": kind, "out_mode": mode, "halves": Halves(out)}
    words |= {"bias": 0 if weight.bias is None else weight.bias, "residual": 0}
    words |= {"blocks": blocks, "units": blocks, "unit": 1}
    write = Access(out, by_columns(v.cols, blocks), write=True)
    return _segment(e, lin.inputs[0], segment, words, [write])


def _segment(e: Emitter, x: Value, segment: Segment, words: dict[str, Any], accesses: list[Access]) -> None:
    """One segment of a linear layer on the rounded x. words, accesses: what concerns the result."""
    mode = _mode(e, segment.format)
    q = _rounded(e, x, mode)
    q.halves |= segment.format is Q6_K
    private = q.row_bytes > 0
    words = words | {"x": q, "mode": mode, "weights": segment.data, "block_bytes": segment.block_bytes}
    words |= {"cols": width(x.cols), **SCRATCH_WORDS}
    words |= {"own": Own(q) if private else 0, "own_stride": OWN_STRIDE}
    read = Access(q, for_itself(x.rows) if private else ALL)
    e.emit(LINEAR[segment.format.name, mode], x.rows, words, read, *accesses)


def _mode(e: Emitter, form: Format) -> int:
    """What a linear layer with weights of this format reads."""
    return modes(form.name)[e.accurate]


def _only_mode(e: Emitter, v: Value) -> int | None:
    """The mode in which every reader of v wants it rounded, if they agree."""
    if any(user.op != "linear" for user in v.users):
        return None
    wanted = {_mode(e, segment.format) for user in v.users for segment in user.attrs["weight"].segments}
    return wanted.pop() if len(wanted) == 1 else None


def _rounded(e: Emitter, x: Value, mode: int) -> Buffer:
    """The rounded x, once per mode, computing the norm or merge that produces it on the way."""
    if (x, mode) not in e.quantized:
        row = activation_bytes(width(x.cols), mode)
        q = e.quantized[x, mode] = Buffer(row * e.count(x.rows), row)
        words: dict[str, Any] = {"out": q, "mode": mode, "halves": Halves(q), **SCRATCH_WORDS}
        words |= {"own": Own(q), "own_stride": OWN_STRIDE}
        write = Access(q, for_itself(x.rows), write=True)
        if e.gather(x)[0].op == "attention":
            _merge(e, x, words, write)
        else:
            _quantize(e, x, words, write)
    return e.quantized[x, mode]


def _merge(e: Emitter, x: Value, words: dict[str, Any], write: Access) -> None:
    attended, gather = e.gather(x)
    heads: Heads = attended.attrs["heads"]
    partial, slots = e.partials[attended]
    words |= {"x": e.buffer(attended), "gather": gather, "partial": partial, "slots": slots}
    words |= {"heads": heads.q, "dim": heads.dim, "window": heads.window or 0, "batch": e.batch}
    e.emit(merge_quantize, x.rows, words, Access(e.buffer(attended), ALL), Access(partial, ALL), write)


def _quantize(e: Emitter, x: Value, words: dict[str, Any], write: Access) -> None:
    source, weight, eps, gather = x, 0, 0.0, 0
    if x.op == "norm" and x not in e.buffers:
        source, gather = e.gather(x.inputs[0])
        weight, eps = x.attrs["weight"], float(x.attrs["eps"])
    words |= {"x": e.buffer(source), "padded": width(x.cols), "cols": x.cols}
    words |= {"weight": weight, "eps": eps, "gather": gather}
    e.emit(quantize, x.rows, words, Access(e.buffer(source), ALL if gather else for_itself(x.rows)), write)
