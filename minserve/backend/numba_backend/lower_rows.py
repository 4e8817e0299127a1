"""Lowering embed, take, norm and add: rows of floats, where no neighbour computes them.

Owns when one of them needs no instruction of its own. See lower.py.
"""

from __future__ import annotations

from typing import Any

from minserve.backend.numba_backend import rows
from minserve.backend.numba_backend.embed import EMBED
from minserve.backend.numba_backend.emitter import Emitter
from minserve.backend.numba_backend.instruction import ALL, Access, Buffer, by_rows
from minserve.backend.numba_backend.layout import LOGIT_ROWS, width
from minserve.backend.numba_backend.lower_linear import linear_into
from minserve.backend.numba_backend.packing import Matrix
from minserve.backend.numba_backend.recorder import Value, require


def embed(e: Emitter, v: Value) -> None:
    table: Matrix = v.attrs["table"]
    require(len(table.segments) == 1, f"{table.name} mixes encodings")
    (segment,) = table.segments
    words = {"out": e.buffer(v), "table": segment.data, "block_bytes": segment.block_bytes}
    words |= {"padded": width(v.cols), "scale": float(v.attrs["scale"]), "batch": e.batch}
    e.emit(EMBED[segment.format.name], v.rows, words, Access(e.buffer(v), by_rows(v.rows), write=True))


def take(e: Emitter, v: Value) -> None:
    (x,) = v.inputs
    fused = "linear" if x.op == "attention" else "norm"
    if all(user.op == fused for user in v.users) and v is not e.result:
        return  # computed by the norms, or where attention's result is merged and rounded
    words = {"out": e.buffer(v), "x": e.buffer(x), "padded": width(v.cols), "gather": int(e.batch[LOGIT_ROWS])}
    e.emit(rows.take, v.rows, words, Access(e.buffer(x), ALL), Access(e.buffer(v), by_rows(v.rows), write=True))


def norm(e: Emitter, v: Value) -> None:
    if v.users and all(user.op == "linear" for user in v.users):
        return  # computed where the linear layers' input is rounded
    if e.added_by(v):
        return  # computed by the addition
    _norm_into(e, v, e.buffer(v), None)


def _norm_into(e: Emitter, v: Value, out: Buffer, residual: Value | None) -> None:
    x, gather = e.gather(v.inputs[0])
    words: dict[str, Any] = {"out": out, "x": e.buffer(x), "padded": width(v.cols), "cols": v.cols}
    words |= {"weight": v.attrs["weight"], "eps": float(v.attrs["eps"]), "gather": gather}
    words |= {"residual": e.buffer(residual) if residual else 0}
    pattern = by_rows(v.rows)
    accesses = [Access(e.buffer(x), ALL if gather else pattern)]
    if residual:
        accesses.append(Access(e.buffer(residual), pattern))
    e.emit(rows.norm, v.rows, words, *accesses, Access(out, pattern, write=True))


def add(e: Emitter, v: Value) -> None:
    residual, branch = v.inputs
    if e.added_by(branch):
        if branch.op == "linear":
            return linear_into(e, branch, v, residual)
        if branch.op == "norm":
            return _norm_into(e, branch, e.in_place(residual, v), residual)
    words = {"out": e.buffer(v), "a": e.buffer(residual), "b": e.buffer(branch), "padded": width(v.cols)}
    reads = [Access(e.buffer(x), by_rows(v.rows)) for x in v.inputs]
    return e.emit(rows.add, v.rows, words, *reads, Access(e.buffer(v), by_rows(v.rows), write=True))
