"""Lowering rope_write_kv and attention: the two operations that know the KV cache.

Owns what their kernels get beside the values: heads, scales, masks, room for partial results. See lower.py.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from minserve.backend.base import BackendError, Heads
from minserve.backend.numba_backend.attention import MANY, MOST_GROUP, ONES, tile_rows
from minserve.backend.numba_backend.attention_task import scratch_bytes
from minserve.backend.numba_backend.emitter import Emitter
from minserve.backend.numba_backend.instruction import ALL, SCRATCH_WORDS, Access, Buffer, alone, by_columns
from minserve.backend.numba_backend.layout import BLOCK, CHUNK, width
from minserve.backend.numba_backend.recorder import LayerCache, Value
from minserve.backend.numba_backend.rope import rope_write_kv

LOG2_E = math.log2(math.e)


def rope(e: Emitter, v: Value) -> None:
    a, heads, (qkv,) = v.attrs, v.attrs["heads"], v.inputs
    buffer = e.buffers[v] = e.buffer(qkv)
    cache: LayerCache = a["cache"]
    words = {"qkv": buffer, "heads": heads.q, "kv_heads": heads.kv, "dim": heads.dim, "stride": width(v.cols)}
    words |= {"cos": a["rope"].cos, "sin": a["rope"].sin, "half": a["rope"].half}
    words |= {"cache": cache.words, "blocks": cache.blocks, "batch": e.batch, "eps": float(a["eps"]), **SCRATCH_WORDS}
    words |= {name: 0 if a[name] is None else a[name] for name in ("q_norm", "k_norm")}
    pattern = alone(v.rows, by_columns(v.cols, heads.q + 2 * heads.kv))
    accesses = Access(buffer, pattern), Access(buffer, pattern, write=True), Access(cache, pattern, write=True)
    e.emit(rope_write_kv, v.rows, words, *accesses)


def attention(e: Emitter, v: Value) -> None:
    heads: Heads = v.attrs["heads"]
    cache: LayerCache = v.attrs["cache"]
    (q,) = v.inputs
    group = heads.q // heads.kv
    if group > MOST_GROUP:
        raise BackendError(f"{group} query heads per kv head, this backend computes up to {MOST_GROUP}")
    slots = -(-e.limits.max_model_len // (BLOCK * CHUNK))
    partial = Buffer(e.limits.max_requests * heads.q * slots * (heads.dim + 16) * 4)
    e.partials[v] = partial, slots
    one, many = tile_rows(group)
    e.need_scratch(scratch_bytes(max(one, many), heads.dim))
    out = e.buffers[v] = Buffer(e.count(v.rows) * v.cols * 4)
    words = {"out": out, "qkv": e.buffer(q), "partial": partial, "slots": slots, "heads": heads.q}
    words |= {"kv_heads": heads.kv, "dim": heads.dim, "cache": cache.words, "blocks": cache.blocks}
    words |= {"batch": e.batch, "mask": MASKS, "scale": heads.scale * LOG2_E, **SCRATCH_WORDS}
    words |= {"softcap": (heads.softcap or 0) * LOG2_E, "stride": width(q.cols), "window": heads.window or 0}
    reads = Access(e.buffer(q), ALL), Access(cache, ALL)
    shared = ("requests",)  # the two kernels write the rows of different requests: no barrier between them
    for kernel, rows in ((ONES[one], one), (MANY[many], many)):
        writes = Access(out, shared, write=True), Access(partial, shared, write=True)
        e.emit(kernel, v.rows, words | {"tile": rows // group, "tile_rows": rows}, *reads, *writes)


def _masks() -> npt.NDArray[np.float32]:
    """[2, 17, 16]: what is added to a block's scores to hide all but the first n keys, and the first n keys."""
    lanes, n = np.arange(BLOCK), np.arange(BLOCK + 1)[:, None]
    return np.where(np.stack([lanes < n, lanes >= n]), 0, -1e30).astype(np.float32)


MASKS = _masks()
