"""A forward pass made ready: KV cache, buffers, one CUDA graph per batch bucket, and how a step runs.

Owns device memory and the stream. A decode step (one token a request) replays a graph; everything else launches the
same instructions one by one. It must not know the model: what it does was recorded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from minserve.backend.base import Forward, KVSpec, ModelSpec, StepLimits
from minserve.backend.cuda_backend.attention import Scratch
from minserve.backend.cuda_backend.kernels import DTYPES, Progress
from minserve.backend.cuda_backend.lowering import Lowering
from minserve.backend.cuda_backend.ops import Machine
from minserve.backend.cuda_backend.recorder import Recorder
from minserve.backend.cuda_backend.sampler import Sampler, adjusted_rows
from minserve.backend.cuda_backend.step import Shape, Staging, Step, check
from minserve.backend.sampling import check_ids
from minserve.batch import Batch, Float32, Sampled


def buckets(max_requests: int) -> list[int]:
    """Batch sizes that get a graph: padding wastes at most a third, above 8 rows at most 7 rows."""
    sizes = [1, 2, 4, *range(8, max_requests, 8)]
    return [size for size in sizes if size < max_requests] + [max_requests]


class CudaProgram:
    """See base.Program. `graphs` off runs every step launch by launch (for comparison)."""

    def __init__(
        self,
        machine: Machine,
        forward: Forward,
        spec: ModelSpec,
        limits: StepLimits,
        *,
        graphs: bool = True,
        progress: Progress = lambda _: None,
    ) -> None:
        self._m, self._spec, self._limits = machine, spec, limits
        self._stream = machine.cp.cuda.Stream(non_blocking=True)
        self._graphs: dict[int, Any] = {}  # by bucket
        self._closed = False
        with self._stream:
            self._allocate(forward)
            machine.kernels.compile(progress)
            self._warm_up()
            if graphs:
                progress("capturing CUDA graphs")
                self._capture()

    # -- construction ------------------------------------------------------------
    def _allocate(self, forward: Forward) -> None:
        m, limits, spec = self._m, self._limits, self._spec
        cp, dtype = m.cp, DTYPES[m.compute]
        self._caches = [cp.empty(cache_shape(kv, limits.num_blocks, m.block_size), dtype) for kv in spec.kv]
        recorder = Recorder()
        output = forward(recorder, None, self._caches)
        self._scratch = Scratch.make(m, recorder.attention_heads(), limits.max_requests)
        self._lowered = Lowering(m, recorder, output, self._scratch).finish(limits)
        if output.cols != spec.vocab_size:
            raise ValueError(f"the forward pass returns {output.cols} columns, the vocabulary has {spec.vocab_size}")
        self._logits = self._lowered.logits.array
        self._staging = Staging(cp, limits, m.block_size)
        self._sampler = Sampler(cp, m.kernels, limits, spec.vocab_size)
        self._pools = cp.asarray(np.array([c.data.ptr for c in self._caches], np.uint64))
        self._block_bytes = cp.asarray(np.array([c.nbytes // limits.num_blocks for c in self._caches], np.int32))
        self._copy = m.kernels.get("copy_blocks", "copy_blocks")

    def _warm_up(self) -> None:
        """Run a prompt and each step that gets a graph: modules load lazily, cuBLAS has a kernel for each shape."""
        limits = self._limits
        longest = min(limits.max_tokens, limits.max_model_len)
        chunk = Shape(longest, 1, min(longest, limits.max_rows))
        for shape in (chunk, *(self._decode_shape(size) for size in reversed(buckets(limits.max_requests)))):
            self._launch(self._staging.blank(shape, shape.tokens // shape.requests))
            self._stream.synchronize()

    def _capture(self) -> None:
        for size in reversed(buckets(self._limits.max_requests)):
            step = self._staging.blank(self._decode_shape(size), 1)
            self._stream.synchronize()
            self._stream.begin_capture()
            try:
                self._launch(step)
            finally:
                graph = self._stream.end_capture()
            self._graphs[size] = graph

    def _decode_shape(self, size: int) -> Shape:
        return Shape(size, size, min(size, self._limits.max_rows))

    # -- running -----------------------------------------------------------------
    @contextmanager
    def _step(self) -> Iterator[None]:
        """On the program's stream; afterwards nothing of the step is under way, even if it fails halfway: the next one
        writes into the same staging buffer, which a copy may not have read yet."""
        with self._stream:
            try:
                yield
            finally:
                self._stream.synchronize()

    def run(self, batch: Batch) -> Sampled:
        with self._step():
            return self._sampler.wait(batch.sampling, self.queue(batch))

    def queue(self, batch: Batch) -> Sequence[Any]:
        """Everything of a step that the host does before it waits, on the current stream."""
        check_ids(batch.sampling, self._spec.vocab_size)
        adjusted = adjusted_rows(batch.sampling)
        step = self._forward(batch, adjusted)
        self._sampler.reset(batch.resets, step.resets)
        return self._sampler.draw(self._logits, batch, step, adjusted)

    def logits(self, batch: Batch) -> Float32:
        with self._step():
            self._forward(batch, adjusted_rows(batch.sampling))
            logits: Float32 = self._logits[: batch.num_rows].get()
            return logits

    def _forward(self, batch: Batch, adjusted: npt.NDArray[np.bool_]) -> Step:
        """Queue the step up to its logits."""
        check(batch, self._limits, self._spec.vocab_size, self._m.block_size)
        size = self._bucket(batch)
        shape = (
            Shape(batch.num_tokens, batch.num_requests, batch.num_rows) if size is None else self._decode_shape(size)
        )
        step = self._staging.upload(batch, shape, adjusted, self._stream)
        if len(batch.copies):
            grid = len(batch.copies), len(self._caches)
            self._copy(grid, 256, self._pools, self._block_bytes, step.inputs["copies"])
        if size is None:
            self._launch(step)
        else:
            self._graphs[size].launch(self._stream)
        return step

    def _bucket(self, batch: Batch) -> int | None:
        """The graph for this step: every request has one new token, and it fits."""
        if not self._graphs or not 0 < batch.num_tokens == batch.num_requests:
            return None
        sizes = sorted(self._graphs)
        at = bisect_left(sizes, max(batch.num_requests, batch.num_rows))
        return sizes[at] if at < len(sizes) else None

    def _launch(self, step: Step) -> None:
        for instruction, sampled in self._lowered.instructions:
            if step.shape.rows or not sampled:  # the middle of a prompt has no logit rows
                instruction(step)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with suppress(self._m.cp.cuda.runtime.CUDARuntimeError):  # nobody can wait for a GPU that has failed
            self._stream.synchronize()
        self._graphs.clear()
        del self._lowered, self._caches, self._logits, self._scratch
        del self._sampler, self._staging, self._pools, self._block_bytes
        self._m.cp.get_default_memory_pool().free_all_blocks()


def scratch_memory(machine: Machine, forward: Forward, spec: ModelSpec, limits: StepLimits) -> int:
    """Device bytes of a program beside weights and KV cache, from shapes alone: nothing is allocated."""
    recorder = Recorder()
    output: Any = forward(recorder, None, [None] * len(spec.kv))
    arenas, _ = Lowering(machine, recorder, output, Scratch(None, None)).arenas(limits)
    sizes = Scratch.sizes(machine, recorder.attention_heads(), limits.max_requests)
    words = sum(sizes) + Staging.words(limits, machine.block_size)
    return sum(arenas) + 4 * words + Sampler.nbytes(limits, spec.vocab_size)


def cache_shape(kv: KVSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """[blocks, kv heads, k or v, block size, head dim]"""
    return num_blocks, kv.kv_heads, 2, block_size, kv.head_dim
