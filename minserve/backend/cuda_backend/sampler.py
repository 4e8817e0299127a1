"""Sampling on the device: the launches around sampling.cu, logprobs.cu and seats.cu.

Owns the penalty counts of the seats and the buffers between logits and tokens. The specification is
minserve/backend/sampling.py. It must not know how logits were made. Its launches are not part of a graph: they are
queued while the graph still runs, so their host time is hidden, and steps that are off cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from minserve.backend.base import StepLimits
from minserve.backend.cuda_backend.kernels import Kernels, cdiv, i32
from minserve.backend.cuda_backend.step import Step
from minserve.batch import Batch, Sampled, SamplingArrays, SeatReset
from minserve.request import TokenLogprob

THREADS = 1024
ADJUSTED_ROWS = 32  # rows with penalties, bias or mask that are prepared at a time: bounds a buffer of [rows, V] floats


def adjusted_rows(arrays: SamplingArrays) -> npt.NDArray[np.bool_]:
    """The rows whose logits change before the draw [S]."""
    rows: npt.NDArray[np.bool_] = np.diff(arrays.bias_starts) > 0
    rows |= (arrays.seats >= 0) & (arrays.penalties != np.array([0, 0, 1], np.float32)).any(axis=1)
    if arrays.mask is not None:
        rows[:] = True
    return rows & (arrays.targets < 0)


class Sampler:
    def __init__(self, cp: Any, kernels: Kernels, limits: StepLimits, vocab_size: int) -> None:
        self._cp, self._vocab = cp, vocab_size
        shapes = self._shapes(limits, vocab_size)
        self._counts = cp.zeros(*shapes["counts"])
        self._adjusted, self._masks, self._tokens = (cp.empty(*shapes[n]) for n in ("adjusted", "masks", "tokens"))
        self._memory = cp.cuda.alloc_pinned_memory(self._masks.nbytes)
        self._host_masks = np.frombuffer(self._memory, np.uint32, self._masks.size).reshape(self._masks.shape)
        pinned = cp.cuda.alloc_pinned_memory(4 * limits.max_rows)
        self._host_tokens = np.frombuffer(pinned, np.int32, limits.max_rows)
        self._reset = kernels.get("seats", "reset_seat")
        self._adjust = kernels.get("sampling", "adjust", THREADS)
        self._sample = kernels.get("sampling", "sample", THREADS)
        self._logprobs = kernels.get("logprobs", "logprobs", THREADS)

    @staticmethod
    def _shapes(limits: StepLimits, vocab_size: int) -> dict[str, tuple[tuple[int, ...], type]]:
        """Shape and dtype of the device's arrays."""
        return {
            "counts": ((limits.max_requests, vocab_size), np.uint16),
            "adjusted": ((min(ADJUSTED_ROWS, limits.max_rows), vocab_size), np.float32),
            "masks": ((limits.max_rows, cdiv(vocab_size, 32)), np.uint32),
            "tokens": ((limits.max_rows,), np.int32),
        }

    @classmethod
    def nbytes(cls, limits: StepLimits, vocab_size: int) -> int:
        """Device memory of a sampler."""
        shapes = cls._shapes(limits, vocab_size).values()
        return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes)

    def reset(self, resets: Sequence[SeatReset], known: Sequence[Any]) -> None:
        """Count what the seats' new owners already know; known: their prompts and outputs, on the device."""
        for reset, tokens in zip(resets, known, strict=True):
            lengths = i32(len(reset.prompt)), i32(tokens.size)
            self._reset((1,), THREADS, self._counts[reset.seat], tokens, *lengths, i32(self._vocab))

    def draw(self, logits: Any, batch: Batch, step: Step, adjusted: npt.NDArray[np.bool_]) -> Sequence[Any]:
        """Queue the draw of one token a row of logits [S, V], counted by seat. Returns what `wait` needs."""
        rows, arrays = batch.num_rows, batch.sampling
        if rows == 0:
            return ()
        inputs = step.inputs
        changes = adjusted.any()
        masks = self._upload_masks(arrays.mask) if changes and arrays.mask is not None else None
        at_once = len(self._adjusted) if changes else rows
        for first in range(0, rows, at_once):
            grid = (min(at_once, rows - first),)
            flags = inputs["adjusted"], self._counts
            if changes:
                names = "penalties", "seats", "bias_starts", "bias_ids", "bias_values"
                arguments = self._adjusted, logits, *flags, *(inputs[name] for name in names), masks
                self._adjust(grid, THREADS, *arguments, i32(self._vocab), i32(first))
            knobs = [
                inputs[name] for name in ("temperature", "top_k", "top_p", "min_p", "uniforms", "targets", "seats")
            ]
            arguments = self._tokens, logits, self._adjusted, *flags, *knobs
            self._sample(grid, THREADS, *arguments, i32(self._vocab), i32(first))
        self._tokens[:rows].get(out=self._host_tokens[:rows], blocking=False)
        return self._describe(logits, arrays, step, rows)

    def wait(self, arrays: SamplingArrays, described: Sequence[Any]) -> Sampled:
        """Wait for what `draw` queued."""
        self._cp.cuda.get_current_stream().synchronize()
        tokens = self._host_tokens[: len(arrays.targets)].copy()
        return Sampled(tokens, collect(tokens, arrays, [array.get() for array in described]))

    def _upload_masks(self, mask: npt.NDArray[np.uint32]) -> Any:
        """The rows' masks on the device, from pinned memory of their own: with a bit for each word of the vocabulary
        they are larger than all other inputs together, and few steps have any."""
        self._host_masks[: len(mask)] = mask
        self._masks[: len(mask)].set(self._host_masks[: len(mask)])
        return self._masks

    def _describe(self, logits: Any, arrays: SamplingArrays, step: Step, rows: int) -> Sequence[Any]:
        """Log probabilities of the tokens [S], ids and log probabilities of the best [S, k]; none if no row wants any.
        They stay on the device."""
        if not ((arrays.logprobs >= 0) | (arrays.targets >= 0)).any():
            return ()
        k = max(1, min(int(arrays.logprobs.max()), self._vocab))
        out = [
            self._cp.empty(shape, t)
            for shape, t in ((rows, np.float32), ((rows, k), np.int32), ((rows, k), np.float32))
        ]
        wanted = self._tokens, step.inputs["targets"], step.inputs["logprobs"]
        self._logprobs((rows,), THREADS, *out, logits, *wanted, i32(self._vocab), i32(k))
        return out


def collect(
    tokens: npt.NDArray[np.int32], arrays: SamplingArrays, described: Sequence[npt.NDArray[Any]]
) -> tuple[TokenLogprob | None, ...]:
    if not described:
        return (None,) * len(tokens)
    logprobs, ids, values = described
    out: list[TokenLogprob | None] = []
    for s, token in enumerate(tokens):
        if token < 0 or (arrays.logprobs[s] < 0 and arrays.targets[s] < 0):
            out.append(None)
            continue
        k = max(0, min(int(arrays.logprobs[s]), ids.shape[1]))
        top = tuple((int(i), float(v)) for i, v in zip(ids[s, :k], values[s, :k], strict=True))
        out.append(TokenLogprob(int(token), float(logprobs[s]), top))
    return tuple(out)
