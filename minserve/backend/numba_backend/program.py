"""A recorded forward pass, ready to run: the step's buffers, the tape, the team, the KV cache and the sampler.

Owns what lives as long as the loaded model runs. It must not know how kernels work. Every array of a batch is copied
into a fixed buffer whose address stands in the tape (staging.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from minserve.backend.base import BackendError, Forward, ModelSpec, StepLimits
from minserve.backend.numba_backend.emitter import Emitter
from minserve.backend.numba_backend.kv_memory import KVMemory
from minserve.backend.numba_backend.layout import S_ROWS, width
from minserve.backend.numba_backend.lower import lower, lower_sampling
from minserve.backend.numba_backend.recorder import Recorder, Value, sink_takes
from minserve.backend.numba_backend.sampling import SKIP
from minserve.backend.numba_backend.staging import SamplingBuffers, StepBuffers
from minserve.backend.numba_backend.tape import Tape
from minserve.backend.numba_backend.team import Team
from minserve.backend.sampling import Seats, check_ids, sample
from minserve.batch import Batch, Float32, Sampled, SamplingArrays
from minserve.request import TokenLogprob


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
        self.memory = KVMemory(spec.kv, limits.num_blocks)
        self.buffers = StepBuffers(limits, spec.vocab_size, self.memory)
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
        rows, drawn = batch.num_rows, self._compute(batch)
        for reset in batch.resets:
            self._seats.reset(reset)
        tokens = self.sampling.tokens[:rows].copy()
        logprobs: list[TokenLogprob | None] = [None] * rows
        if drawn < rows:
            left = np.flatnonzero(self.sampling.kinds[:rows] == SKIP)
            rest = sample(self.view(rows)[left], select_rows(batch.sampling, left), self._seats)
            tokens[left] = rest.tokens
            for s, logprob in zip(left, rest.logprobs, strict=True):
                logprobs[s] = logprob
        return Sampled(tokens, tuple(logprobs))

    def logits(self, batch: Batch) -> Float32:
        self._compute(batch)
        return self.view(batch.num_rows).copy()

    def _compute(self, batch: Batch) -> int:
        """Leave the step's logits in their buffer, and the tokens of as many rows as it returns in theirs."""
        self._check(batch)
        self.buffers.fill(batch)
        drawn = self.sampling.fill(batch.sampling)
        if len(batch.copies):
            self.memory.copy(batch.copies[:, 0], batch.copies[:, 1])
        self.memory.touch_ahead(batch.slots)
        try:
            self.team.run()
        finally:
            self.memory.step_over()
        return drawn

    def view(self, rows: int) -> Float32:
        """The buffer of the last step's logits."""
        return self._logits[:rows, : self._spec.vocab_size]

    def _check(self, batch: Batch) -> None:
        """What is rare in a batch; the rest is checked where it is copied."""
        for name, ids, bound in (
            ("copies", batch.copies, self._limits.num_blocks),
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
