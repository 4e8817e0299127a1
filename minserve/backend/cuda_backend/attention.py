"""What attention launches: decode_attention.cu for requests with one new token, prefill_attention.cu for the others.

Owns how a context is cut into splits, and what these leave each other. It must not know the model, nor how buffers
were assigned.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from minserve.backend.base import BackendError, Heads
from minserve.backend.cuda_backend.kernels import cdiv, f32, i32
from minserve.backend.cuda_backend.ops import Buffer, Machine
from minserve.backend.cuda_backend.step import Step

NO_WINDOW = 1 << 30
MAX_GROUP = 16  # query heads on one key head: the rows of decode_attention.cu's mma tile
DECODE_TOKENS = 64  # tokens that a block of decode_attention.cu takes in at once; 32 for large heads
MAX_SPLITS = 64


def decode_splits(m: Machine, heads: Heads, requests: int) -> int:
    """Parts a request's context is cut into: enough for two blocks on every multiprocessor, at most one per step."""
    span = m.max_model_len if heads.window is None else min(m.max_model_len, heads.window + DECODE_TOKENS)
    wanted = cdiv(2 * m.sms, heads.kv * requests)
    return max(1, min(wanted, cdiv(span, DECODE_TOKENS), MAX_SPLITS))


def decode_launch(dim: int) -> tuple[int, int]:
    """Threads and bytes of shared memory of decode_attention.cu: two tiles of 16 keys and values for each warp."""
    warps = 4 if dim <= 128 else 2
    return 32 * warps, warps * 4 * 16 * row_bytes(dim)


def prefill_launch(dim: int) -> tuple[int, int]:
    """Query rows of a block of prefill_attention.cu and its bytes of shared memory: those, two tiles of 32 keys."""
    rows = 128 if dim <= 128 else 64
    return rows, (rows + 4 * 32) * row_bytes(dim)


def row_bytes(dim: int) -> int:
    """kPitch of attention.cuh."""
    return 2 * (dim + 8)


@dataclass(frozen=True, slots=True)
class Scratch:
    """What the splits of a context leave each other, for all layers, which run one after the other.

    parts: float32 results. tickets: a uint32 counter for each request and kv head, 0 between launches.
    """

    parts: Any
    tickets: Any

    @staticmethod
    def sizes(m: Machine, layers: Collection[Heads], max_requests: int) -> tuple[int, int]:
        """Numbers in either, for any number of requests."""
        parts = [
            decode_splits(m, heads, requests) * requests * heads.q * (heads.dim + 2)
            for heads in layers
            for requests in range(1, max_requests + 1)
        ]
        return max(parts, default=1), max_requests * max((heads.kv for heads in layers), default=1)

    @classmethod
    def make(cls, m: Machine, layers: Collection[Heads], max_requests: int) -> Scratch:
        parts, tickets = cls.sizes(m, layers, max_requests)
        return cls(m.cp.empty(parts, np.float32), m.cp.zeros(tickets, np.uint32))


class Attention:
    def __init__(self, m: Machine, out: Buffer, q: Buffer, heads: Heads, cache: Any, scratch: Scratch) -> None:
        if heads.q // heads.kv > MAX_GROUP:
            raise BackendError(f"{heads.q} query heads on {heads.kv} key heads: a GPU takes at most {MAX_GROUP} on one")
        self._m, self._out, self._q, self._heads, self._cache, self._scratch = m, out, q, heads, cache, scratch
        self._decode_threads, self._decode_shared = decode_launch(heads.dim)
        self._prefill_rows, self._prefill_shared = prefill_launch(heads.dim)
        parameters = m.compute, heads.dim, m.block_size, heads.softcap is not None
        name = "decode_attention"
        self._decode = m.kernels.get(name, name, *parameters, shared=self._decode_shared)
        name = "prefill_attention"
        self._prefill = m.kernels.get(name, name, *parameters, shared=self._prefill_shared)

    def __call__(self, step: Step) -> None:
        h, inputs, requests = self._heads, step.inputs, step.shape.requests
        batch = inputs["block_tables"], inputs["table_starts"], inputs["context_lens"], inputs["query_starts"]
        sizes = i32(self._q.cols), i32(h.q // h.kv), i32(h.kv), i32(h.window or NO_WINDOW)
        rest = self._q.array, self._cache, *batch, *sizes, f32(h.scale), f32(h.softcap or 0)
        if step.longest > 1:
            grid = (cdiv(step.longest * (h.q // h.kv), self._prefill_rows), h.kv, requests)
            self._prefill(grid, 128, self._out.array, *rest, shared=self._prefill_shared)
        if step.singles:
            splits = decode_splits(self._m, h, requests)
            parts, at = self._scratch.parts, requests * h.q * splits * h.dim
            outputs = self._out.array, parts[:at], parts[at:], self._scratch.tickets
            grid = (splits, h.kv, requests)
            self._decode(grid, self._decode_threads, *outputs, *rest, shared=self._decode_shared)
