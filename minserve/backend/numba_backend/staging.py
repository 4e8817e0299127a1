"""A batch's arrays on their way to where the tape reads them: each number is checked, then copied, in one pass.

Owns the buffers whose addresses stand in the tape. It must not know kernels: those follow every index without looking.
Compiled, because a NumPy call on a handful of numbers spends its time on code that the weights have pushed out of the
caches, and it would take thirty of them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from minserve.backend.base import StepLimits
from minserve.backend.numba_backend.arena import aligned
from minserve.backend.numba_backend.jit import entry, inlined
from minserve.backend.numba_backend.kv_memory import KVMemory, place
from minserve.backend.numba_backend.layout import (
    BLOCK,
    CHUNK,
    G_ROWS,
    HEADER,
    LENGTHS,
    LOGIT_ROWS,
    P_ROWS,
    PLACES,
    POSITIONS,
    REQUEST_OF,
    REQUESTS,
    S_ROWS,
    SLOTS,
    STARTS,
    T_ROWS,
    TABLE_WIDTH,
    TABLES,
    TOKEN_IDS,
)
from minserve.backend.numba_backend.sampling import DRAW, SKIP
from minserve.backend.numba_backend.simd_memory import i32, i64, set_f32, set_i32, set_i64
from minserve.batch import Batch, Int32, SamplingArrays

_INT, _INTS, _FLOATS = types.int64, types.Array(types.int32, 1, "A"), types.Array(types.float32, 1, "A")
_FLAGS = types.Array(types.boolean, 1, "A")
_TABLE, _TRIPLES, _BITS = (types.Array(kind, 2, "A") for kind in (types.int32, types.float32, types.uint32))

_VOCAB, _MODEL_LEN, _BLOCKS, _RUN, _JUMP = range(5)  # words of the bounds
_FINE, GENERATED = -1, -2
_NAMES = {
    TOKEN_IDS: "token_ids",
    POSITIONS: "positions",
    SLOTS: "slots",
    STARTS: "query_starts",
    LENGTHS: "context_lens",
    TABLES: "block_tables",
    LOGIT_ROWS: "logit_rows",
    GENERATED: "generated",
}
_NO_MASK = np.zeros((0, 0), np.uint32)


@inlined
def set_header(header, tokens, requests, rows, generated):
    set_i64(header, T_ROWS, tokens)
    set_i64(header, REQUESTS, requests)
    set_i64(header, S_ROWS, rows)
    set_i64(header, G_ROWS, generated)
    set_i64(header, P_ROWS, tokens - generated)


@inlined
def wrong_token(token, position, slot, bounds):
    if not 0 <= token < i64(bounds, _VOCAB):
        return TOKEN_IDS
    if not 0 <= position < i64(bounds, _MODEL_LEN):
        return POSITIONS
    return _FINE if 0 <= slot < i64(bounds, _BLOCKS) * BLOCK else SLOTS


@entry(_INT, _INTS, _INTS, _INTS, _INTS, _INTS, _TABLE, _FLAGS, _INTS, _INT, _INT)
def stage(ids, positions, slots, starts, lengths, tables, generated, logit_rows, words, bounds):
    """Fill the batch block: requests whose tokens were generated, then those whose tokens are of their prompts. Returns
    the word of an array that is wrong, whose buffers then hold anything, or _FINE."""
    tokens, requests, blocks = len(ids), len(lengths), i64(bounds, _BLOCKS)
    run, jump = i64(bounds, _RUN), i64(bounds, _JUMP)
    if len(positions) != tokens:
        return POSITIONS
    if len(slots) != tokens:
        return SLOTS
    if len(starts) != requests + 1 or starts[0] != 0 or starts[requests] != tokens:
        return STARTS
    if tables.shape[0] != requests:
        return TABLES
    if len(generated) != requests:
        return GENERATED
    row, to, before = 0, 0, 0
    for prompts in (False, True):
        for r in range(requests):
            if generated[r] == prompts:
                continue
            first, last = np.int64(starts[r]), np.int64(starts[r + 1])
            if not first <= last <= tokens:
                return STARTS
            if not 0 <= lengths[r] <= i64(bounds, _MODEL_LEN):
                return LENGTHS
            for t in range(first, last):
                wrong = wrong_token(ids[t], positions[t], slots[t], bounds)
                if wrong != _FINE:
                    return wrong
                set_i32(i64(words, TOKEN_IDS), to, np.int64(ids[t]))
                set_i32(i64(words, POSITIONS), to, np.int64(positions[t]))
                set_i32(i64(words, SLOTS), to, place(np.int64(slots[t]), run * BLOCK, jump * BLOCK))
                set_i32(i64(words, REQUEST_OF), to, row)
                set_i32(i64(words, PLACES), t, to)
                to += 1
            for b in range(tables.shape[1]):
                if not 0 <= tables[r, b] < blocks:
                    return TABLES
                at = row * i64(words, TABLE_WIDTH) + b
                set_i32(i64(words, TABLES), at, place(np.int64(tables[r, b]), run, jump))
            set_i32(i64(words, LENGTHS), row, np.int64(lengths[r]))
            row += 1
            set_i32(i64(words, STARTS), row, to)
        before = before if prompts else to
    for s in range(len(logit_rows)):
        if not 0 <= logit_rows[s] < tokens:
            return LOGIT_ROWS
        set_i32(i64(words, LOGIT_ROWS), s, i32(i64(words, PLACES), np.int64(logit_rows[s])))
    set_header(i64(words, HEADER), tokens, requests, len(logit_rows), before)
    return _FINE


class StepBuffers:
    """The integer inputs of a step, as kernels address them. words: the batch block of layout.py."""

    def __init__(self, limits: StepLimits, vocab_size: int, memory: KVMemory) -> None:
        t, r, s = limits.max_tokens, limits.max_requests, limits.max_rows
        self._limits = limits
        self.table_width = -(-limits.max_model_len // BLOCK)
        self.header = aligned(8 * 8).view(np.int64)
        self.words = aligned(16 * 8).view(np.int64)
        self.arrays: dict[int, Int32] = {}
        sizes = {
            TOKEN_IDS: t,
            POSITIONS: t,
            SLOTS: t,
            REQUEST_OF: t,
            PLACES: t,
            STARTS: r + 1,
            LENGTHS: r,
            LOGIT_ROWS: s,
        }
        tables = r * self.table_width + CHUNK  # attention looks a chunk ahead
        for word, size in {**sizes, TABLES: tables}.items():
            self.arrays[word] = aligned(4 * size).view(np.int32)
            self.words[word] = self.arrays[word].ctypes.data
        self.words[TABLE_WIDTH] = self.table_width
        self.words[HEADER] = self.header.ctypes.data
        self._bounds = np.array(
            [vocab_size, limits.max_model_len, limits.num_blocks, memory.run, memory.jump], np.int64
        )
        self._addresses = self.words.ctypes.data, self._bounds.ctypes.data
        stage.compile()

    def fill(self, batch: Batch) -> None:
        """ValueError, naming what is wrong, before a kernel is led astray."""
        limits = self._limits
        for name, count, limit in (
            ("tokens", batch.num_tokens, limits.max_tokens),
            ("requests", batch.num_requests, limits.max_requests),
            ("logit rows", batch.num_rows, limits.max_rows),
            ("blocks a request", batch.block_tables.shape[1], self.table_width),
        ):
            if count > limit:
                raise ValueError(f"a step of {count} {name}, the limit is {limit}")
        wrong = stage(
            batch.token_ids,
            batch.positions,
            batch.slots,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            batch.generated,
            batch.logit_rows,
            *self._addresses,
        )
        if wrong != _FINE:
            raise ValueError(self._complaint(_NAMES[wrong], batch))

    def _complaint(self, name: str, batch: Batch) -> str:
        ids, limits = getattr(batch, name), self._limits
        found = f"{ids.min()}..{ids.max()}" if ids.size else "nothing"
        step = f"{batch.num_tokens} tokens of {batch.num_requests} requests"
        room = f"{self._bounds[_VOCAB]} token ids, {limits.max_model_len} positions and {limits.num_blocks} blocks"
        return f"{name} of shape {ids.shape} holds {found}, in a step of {step}; there are {room}"


@entry(_INT, *[_FLOATS] * 4, *[_INTS] * 4, _TRIPLES, _BITS, _INT)
def stage_rows(temperature, top_p, min_p, uniforms, top_k, targets, logprobs, bias_starts, penalties, mask, words):
    """Fill what sample_rows reads. Returns how many rows temperature, top_k, top_p and min_p describe fully: those are
    drawn, the others skipped. Negative: the arrays' lengths differ."""
    rows, drawn = len(temperature), 0
    if min(len(top_p), len(min_p), len(uniforms), len(top_k), len(targets), len(logprobs), len(penalties)) < rows:
        return -1
    if len(bias_starts) < rows + 1 or 0 < mask.shape[0] < rows:
        return -1
    for s in range(rows):
        set_f32(i64(words, 0), s, temperature[s])
        set_f32(i64(words, 1), s, top_p[s])
        set_f32(i64(words, 2), s, min_p[s])
        set_f32(i64(words, 3), s, uniforms[s])
        set_i32(i64(words, 4), s, np.int64(top_k[s]))
        plain = targets[s] < 0 and logprobs[s] < 0 and bias_starts[s] == bias_starts[s + 1]
        plain = plain and penalties[s, 0] == 0 and penalties[s, 1] == 0 and penalties[s, 2] == 1
        if plain and mask.shape[0]:
            for word in range(mask.shape[1]):
                plain = plain and mask[s, word] == 0xFFFFFFFF
        set_i32(i64(words, 5), s, DRAW if plain else SKIP)
        drawn += 1 if plain else 0
    return drawn


class SamplingBuffers:
    """What sample_rows reads, and the tokens it draws."""

    def __init__(self, rows: int) -> None:
        self.tokens: Int32 = aligned(4 * rows).view(np.int32)
        self.kinds: Int32 = aligned(4 * rows).view(np.int32)
        floats = {name: aligned(4 * rows).view(np.float32) for name in ("temperature", "top_p", "min_p", "uniforms")}
        staged: dict[str, npt.NDArray[Any]] = {**floats, "top_k": aligned(4 * rows).view(np.int32), "kinds": self.kinds}
        self.arrays = {**staged, "tokens": self.tokens}
        self._words = np.array([array.ctypes.data for array in staged.values()], np.int64)
        self._address = self._words.ctypes.data
        stage_rows.compile()

    def fill(self, arrays: SamplingArrays) -> int:
        """Returns how many rows will be drawn; the others are of kind SKIP."""
        drawn: int = stage_rows(
            arrays.temperature,
            arrays.top_p,
            arrays.min_p,
            arrays.uniforms,
            arrays.top_k,
            arrays.targets,
            arrays.logprobs,
            arrays.bias_starts,
            arrays.penalties,
            _NO_MASK if arrays.mask is None else arrays.mask,
            self._address,
        )
        if drawn < 0:
            raise ValueError("the sampling arrays of a step differ in length")
        return drawn
