"""A recorded forward pass, ready to run: the step's buffers, the tape, the team, the KV cache and the sampler.

Owns what lives as long as the loaded model runs. It must not know how kernels work. Every array of a batch is copied
into a fixed buffer whose address stands in the tape; refilling costs a few microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from minserve.backend.base import BackendError, Forward, ModelSpec, StepLimits
from minserve.backend.numba_backend.arena import address, aligned
from minserve.backend.numba_backend.emitter import Emitter
from minserve.backend.numba_backend.kv_memory import KVMemory
from minserve.backend.numba_backend.layout import (
    BLOCK,
    CHUNK,
    HEADER,
    LENGTHS,
    LOGIT_ROWS,
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
    width,
)
from minserve.backend.numba_backend.lower import lower, lower_sampling
from minserve.backend.numba_backend.recorder import Recorder, Value, sink_takes
from minserve.backend.numba_backend.sampling import DRAW, SKIP
from minserve.backend.numba_backend.tape import Tape
from minserve.backend.numba_backend.team import Team
from minserve.backend.sampling import Seats, check_ids, sample
from minserve.batch import Batch, Float32, Int32, Sampled, SamplingArrays
from minserve.request import TokenLogprob


class StepBuffers:
    """The integer inputs of a step, as kernels address them. words: the batch block of layout.py."""

    def __init__(self, limits: StepLimits) -> None:
        t, r, s = limits.max_tokens, limits.max_requests, limits.max_rows
        self.table_width = -(-limits.max_model_len // BLOCK)
        self.header = aligned(8 * 8).view(np.int64)
        self.words = aligned(16 * 8).view(np.int64)
        self.arrays: dict[int, Int32] = {}
        sizes = {TOKEN_IDS: t, POSITIONS: t, SLOTS: t, REQUEST_OF: t, STARTS: r + 1, LENGTHS: r, LOGIT_ROWS: s}
        for word, size in {**sizes, TABLES: r * self.table_width + CHUNK}.items():
            self.arrays[word] = aligned(4 * size).view(np.int32)
            self.words[word] = address(self.arrays[word])
        self.words[TABLE_WIDTH] = self.table_width
        self.words[HEADER] = address(self.header)

    def fill(self, batch: Batch, memory: KVMemory) -> None:
        for word, values in (
            (TOKEN_IDS, batch.token_ids),
            (POSITIONS, batch.positions),
            (SLOTS, memory.slots(batch.slots)),
            (STARTS, batch.query_starts),
            (LENGTHS, batch.context_lens),
            (LOGIT_ROWS, batch.logit_rows),
        ):
            self.arrays[word][: len(values)] = values
        requests = batch.num_requests
        self.arrays[REQUEST_OF][: batch.num_tokens] = np.repeat(np.arange(requests), np.diff(batch.query_starts))
        tables = self.arrays[TABLES][:-CHUNK].reshape(-1, self.table_width)  # attention looks a chunk ahead
        tables[:requests, : batch.block_tables.shape[1]] = memory.places(batch.block_tables)
        self.header[[T_ROWS, REQUESTS, S_ROWS]] = batch.num_tokens, requests, batch.num_rows


_NO_PENALTIES = np.array([0, 0, 1], np.float32)


class SamplingBuffers:
    """What sample_rows reads, and the tokens it draws."""

    def __init__(self, rows: int) -> None:
        self.tokens: Int32 = aligned(4 * rows).view(np.int32)
        self.arrays: dict[str, npt.NDArray[Any]] = {"tokens": self.tokens}
        for name in ("kinds", "top_k"):
            self.arrays[name] = aligned(4 * rows).view(np.int32)
        for name in ("temperature", "top_p", "min_p", "uniforms"):
            self.arrays[name] = aligned(4 * rows).view(np.float32)

    def fill(self, arrays: SamplingArrays, plain: npt.NDArray[np.bool_]) -> None:
        count = len(plain)
        for name in ("temperature", "top_k", "top_p", "min_p", "uniforms"):
            self.arrays[name][:count] = getattr(arrays, name)
        self.arrays["kinds"][:count] = np.where(plain, DRAW, SKIP)


def plain_rows(arrays: SamplingArrays) -> npt.NDArray[np.bool_]:
    """Rows that temperature, top_k, top_p and min_p describe fully: [S]."""
    starts = arrays.bias_starts
    plain: npt.NDArray[np.bool_] = (arrays.targets < 0) & (arrays.logprobs < 0) & (starts[:-1] == starts[1:])
    plain &= (arrays.penalties == _NO_PENALTIES).all(axis=1)
    if arrays.mask is not None:
        plain &= (arrays.mask == np.uint32(0xFFFFFFFF)).all(axis=1)
    return plain


def select_rows(arrays: SamplingArrays, rows: npt.NDArray[np.intp]) -> SamplingArrays:
    """The same arrays for some of the rows."""
    starts, stops = arrays.bias_starts[rows], arrays.bias_starts[rows + 1]
    owned = np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)] or [np.zeros(0, np.intp)])
    per_row = ("temperature", "top_p", "top_k", "min_p", "uniforms", "penalties", "logprobs", "targets", "seats")
    return SamplingArrays(
        **{name: getattr(arrays, name)[rows] for name in per_row},
        bias_starts=np.concatenate([[0], np.cumsum(stops - starts)]).astype(np.int32),
        bias_ids=arrays.bias_ids[owned.astype(np.intp)],
        bias_values=arrays.bias_values[owned.astype(np.intp)],
        mask=None if arrays.mask is None else arrays.mask[rows],
    )


class NumbaProgram:
    """The contract's Program."""

    def __init__(
        self,
        forward: Forward,
        spec: ModelSpec,
        limits: StepLimits,
        *,
        threads: int,
        accurate: bool,
        progress: Callable[[str], None],
    ) -> None:
        self._spec, self._limits = spec, limits
        self._seats = Seats(spec.vocab_size)
        self.buffers = StepBuffers(limits)
        self.memory = KVMemory(spec.kv, limits.num_blocks)
        self.memory.take_first()
        result = forward(Recorder(), None, self.memory.layers)
        if not isinstance(result, Value) or result.rows != S_ROWS or result.cols != spec.vocab_size:
            raise BackendError("the forward pass must end in logits [S, vocab]")
        lowered = lower(sink_takes(result), limits, self.buffers.words, accurate)
        self.sampling = SamplingBuffers(limits.max_rows)
        lower_sampling(lowered, spec.vocab_size, self.sampling.arrays)
        compile_kernels(lowered, progress)
        self.tape = Tape(lowered, threads)
        self._logits = self.tape.view(self.tape.out, limits.max_rows, width(spec.vocab_size))
        self.team = Team(threads, self.tape, self.buffers.header)

    def run(self, batch: Batch) -> Sampled:
        check_ids(batch.sampling, self._spec.vocab_size)
        arrays, plain = batch.sampling, plain_rows(batch.sampling)
        logits = self._compute(batch, plain)
        for reset in batch.resets:
            self._seats.reset(reset)
        tokens = self.sampling.tokens[: len(plain)].copy()
        logprobs: list[TokenLogprob | None] = [None] * len(tokens)
        left = np.flatnonzero(~plain)
        if len(left):
            rest = sample(logits[left], select_rows(arrays, left), self._seats)
            tokens[left] = rest.tokens
            for s, logprob in zip(left, rest.logprobs, strict=True):
                logprobs[s] = logprob
        return Sampled(tokens, tuple(logprobs))

    def logits(self, batch: Batch) -> Float32:
        return self._compute(batch, np.zeros(batch.num_rows, np.bool_)).copy()

    def _compute(self, batch: Batch, plain: npt.NDArray[np.bool_]) -> Float32:
        """The step's logits [S, vocab]: a view that the next step overwrites. Draws the plain rows' tokens."""
        self._check(batch)
        if len(batch.copies):
            self.memory.copy(batch.copies[:, 0], batch.copies[:, 1])
        self.memory.touch_ahead(batch.slots)
        self.buffers.fill(batch, self.memory)
        self.sampling.fill(batch.sampling, plain)
        self.team.run()
        return self.view(batch.num_rows)

    def view(self, rows: int) -> Float32:
        """The buffer of the last step's logits."""
        return self._logits[:rows, : self._spec.vocab_size]

    def _check(self, batch: Batch) -> None:
        """Kernels follow every index without looking: ValueError before one of them leads astray."""
        limits = self._limits
        counts = (batch.num_tokens, batch.num_requests, batch.num_rows, batch.block_tables.shape[1])
        most = (limits.max_tokens, limits.max_requests, limits.max_rows, self.buffers.table_width)
        for name, count, limit in zip(
            ("tokens", "requests", "logit rows", "blocks a request"), counts, most, strict=True
        ):
            if count > limit:
                raise ValueError(f"a step of {count} {name}, the limit is {limit}")
        for name, ids, bound in (
            ("token_ids", batch.token_ids, self._spec.vocab_size),
            ("positions", batch.positions, limits.max_model_len),
            ("slots", batch.slots, limits.num_blocks * BLOCK),
            ("block_tables", batch.block_tables, limits.num_blocks),
            ("logit_rows", batch.logit_rows, batch.num_tokens),
            ("copies", batch.copies, limits.num_blocks),
            *(("resets", np.concatenate([r.prompt, r.output]), self._spec.vocab_size) for r in batch.resets),
        ):
            if ids.size and ids.view(np.uint32).max() >= bound:  # a negative one is a large one there
                raise ValueError(f"{name} must lie in 0..{bound - 1}, got {ids.min()}..{ids.max()}")

    def close(self) -> None:
        self.team.close()


def compile_kernels(lowered: Emitter, progress: Callable[[str], None]) -> None:
    """Compile, or load from the cache, what the tape calls; tells progress of each that takes a while."""
    kernels = sorted({instruction.kernel for instruction in lowered.instructions}, key=lambda k: k.name)
    for number, kernel in enumerate(kernels, 1):
        if not kernel.cached:
            progress(f"compiling kernel {number} of {len(kernels)}: {kernel.name}")
        _ = kernel.address
