"""One step as the device sees it: counts that shape grids, and the integer inputs that kernels read.

Owns the layout of the per-step inputs in one staging buffer, so that a step uploads them in a single copy, at the same
addresses every time: a captured graph reads the new values. It must not know what kernels do, nor sampling.

Order in the buffer (4-byte words): the arrays of `sections`, whose sizes follow from the step's shape, then the block
tables, one request after the other, as long as they are, then what most steps don't have: block copies, the tokens
that seats are reset to, biases. These last have no bound of their own; what finds no room goes alone, and only masks
always do (see sampler.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from minserve.backend.base import StepLimits
from minserve.backend.cuda_backend.kernels import cdiv
from minserve.batch import Batch

Words = npt.NDArray[np.int32]
EXTRA_WORDS = 1 << 16  # for copies, resets and biases, beside the longest context's reset


@dataclass(frozen=True, slots=True)
class Shape:
    """tokens T, requests R, rows S: what a graph is captured for."""

    tokens: int
    requests: int
    rows: int


@dataclass(frozen=True, slots=True)
class Step:
    """longest: most new tokens of a request. singles: whether some request has exactly one.

    inputs: device arrays by the names of `sections`, and block_tables, copies, bias_ids, bias_values. resets: the
    prompt and output of each seat that is reset, one array each.
    """

    shape: Shape
    longest: int
    singles: bool
    inputs: Mapping[str, Any]
    resets: Sequence[Any] = ()


def sections(shape: Shape) -> dict[str, tuple[int, type]]:
    """Name -> (numbers, dtype) of every array but the block tables."""
    t, r, s = shape.tokens, shape.requests, shape.rows
    return {
        "token_ids": (t, np.int32),
        "positions": (t, np.int32),
        "slots": (t, np.int32),
        "query_starts": (r + 1, np.int32),
        "context_lens": (r, np.int32),
        "table_starts": (r, np.int32),
        "logit_rows": (s, np.int32),
        "temperature": (s, np.float32),
        "top_p": (s, np.float32),
        "top_k": (s, np.int32),
        "min_p": (s, np.float32),
        "uniforms": (s, np.float32),
        "logprobs": (s, np.int32),
        "targets": (s, np.int32),
        "seats": (s, np.int32),
        "adjusted": (s, np.int32),
        "penalties": (3 * s, np.float32),
        "bias_starts": (s + 1, np.int32),
    }


class Staging:
    """The pinned host buffer, the device buffer of the same size, and views of both by shape."""

    def __init__(self, cp: Any, limits: StepLimits, block_size: int) -> None:
        words = self.words(limits, block_size)
        self._cp, self._block_size = cp, block_size
        self._memory = cp.cuda.alloc_pinned_memory(4 * words)
        self._host: Words = np.frombuffer(self._memory, np.int32, words)
        self._device = cp.empty(words, np.int32)
        self._views: dict[Shape, tuple[dict[str, Any], dict[str, Any]]] = {}

    @staticmethod
    def words(limits: StepLimits, block_size: int) -> int:
        """Size of the buffer on either side."""
        largest = Shape(limits.max_tokens, limits.max_requests, limits.max_rows)
        tables = limits.max_requests * cdiv(limits.max_model_len, block_size)
        return sum(size for size, _ in sections(largest).values()) + tables + limits.max_model_len + EXTRA_WORDS

    def views(self, shape: Shape, *, keep: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        """(host arrays, device arrays) of a shape. keep: remember them, for the shapes of graphs."""
        known = self._views.get(shape)
        if known is not None:
            return known
        host: dict[str, Any] = {}
        device: dict[str, Any] = {}
        at = 0
        for name, (size, dtype) in sections(shape).items():
            host[name] = self._host[at : at + size].view(dtype)
            device[name] = self._device[at : at + size].view(dtype)
            at += size
        host["block_tables"], device["block_tables"] = self._host[at:], self._device[at:]
        if keep:
            self._views[shape] = host, device
        return host, device

    def upload(self, batch: Batch, shape: Shape, adjusted: npt.NDArray[np.bool_], stream: Any) -> Step:
        """Fill the host buffer, rows beyond the batch with padding, and start its copy to the device.

        Padding tokens have slot -1 (nothing is written), padding requests one new token and no context.
        """
        host, device = self.views(shape)
        t, r, s = batch.num_tokens, batch.num_requests, batch.num_rows
        fill(host["token_ids"], batch.token_ids, 0)
        fill(host["positions"], batch.positions, 0)
        fill(host["slots"], batch.slots, -1)
        fill(host["logit_rows"], batch.logit_rows, 0)
        fill(host["context_lens"], batch.context_lens, 0)
        host["query_starts"][: r + 1] = batch.query_starts
        host["query_starts"][r + 1 :] = np.arange(t + 1, t + 1 + shape.requests - r)
        blocks = -(-batch.context_lens // self._block_size)
        ends = np.cumsum(blocks, dtype=np.int32)
        fill(host["table_starts"], ends - blocks, 0)
        width = batch.block_tables.shape[1]
        used = int(ends[-1]) if r else 0
        host["block_tables"][:used] = batch.block_tables[np.arange(width) < blocks[:, None]]
        sampling = batch.sampling
        for name in ("temperature", "top_p", "top_k", "min_p", "uniforms", "logprobs", "targets", "seats"):
            host[name][:s] = getattr(sampling, name)
        host["adjusted"][:s] = adjusted
        host["penalties"][: 3 * s] = sampling.penalties.ravel()
        host["bias_starts"][: s + 1] = sampling.bias_starts
        words = len(self._host) - len(host["block_tables"]) + used
        inputs, resets = dict(device), list[Any]()
        inputs["copies"], words = self._place(batch.copies, words)
        inputs["bias_ids"], words = self._place(sampling.bias_ids, words)
        inputs["bias_values"], words = self._place(sampling.bias_values, words)
        for reset in batch.resets:
            tokens, words = self._place(np.concatenate([reset.prompt, reset.output]), words)
            resets.append(tokens)
        self._device[:words].set(self._host[:words], stream=stream)
        counts = np.diff(batch.query_starts)
        longest = int(counts.max()) if r else 0
        return Step(shape, longest, bool((counts == 1).any()), inputs, resets)

    def _place(self, values: npt.NDArray[Any], at: int) -> tuple[Any, int]:
        """The device array of these numbers, put at word `at` of the host's buffer if they fit, and the word after."""
        end = at + values.size
        if end > len(self._host):
            return self._cp.asarray(np.ascontiguousarray(values)), at
        self._host[at:end] = values.view(np.int32).ravel()
        return self._device[at:end].view(values.dtype), end

    def blank(self, shape: Shape, longest: int) -> Step:
        """A step of padding only, to warm up and to capture: one request of `longest` tokens, or requests of one."""
        host, device = self.views(shape, keep=longest == 1)
        for name, array in host.items():
            if name != "block_tables":
                array[:] = 0
        host["slots"][:] = host["targets"][:] = host["seats"][:] = host["logprobs"][:] = -1
        if longest == 1:
            host["query_starts"][:] = np.arange(shape.requests + 1)
        else:
            host["query_starts"][1:] = host["context_lens"][:] = longest
            host["positions"][:] = np.arange(longest)
            host["block_tables"][: cdiv(longest, self._block_size)] = 0  # every key goes to block 0, and is read there
            host["slots"][:] = np.arange(longest) % self._block_size
        self._device.set(self._host)
        return Step(shape, longest, longest == 1, device)


def fill(target: npt.NDArray[Any], values: npt.NDArray[Any], padding: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = padding


def check(batch: Batch, limits: StepLimits, vocab_size: int, block_size: int) -> None:
    """ValueError for an index that would make a kernel touch memory of another request, or none at all."""
    for name, size, most in (
        ("tokens", batch.num_tokens, limits.max_tokens),
        ("requests", batch.num_requests, limits.max_requests),
        ("logit rows", batch.num_rows, limits.max_rows),
    ):
        if size > most:
            raise ValueError(f"a step of {size} {name} does not fit this program's {most}")
    resets = [(f"resets[{i}]", tokens) for i, r in enumerate(batch.resets) for tokens in (r.prompt, r.output)]
    for name, ids, count in (
        ("token_ids", batch.token_ids, vocab_size),
        ("positions", batch.positions, limits.max_model_len),
        ("slots", batch.slots, limits.num_blocks * block_size),
        ("context_lens", batch.context_lens, limits.max_model_len + 1),
        ("block_tables", batch.block_tables, limits.num_blocks),
        ("logit_rows", batch.logit_rows, batch.num_tokens),
        ("copies", batch.copies, limits.num_blocks),
        ("seats", batch.sampling.seats + 1, limits.max_requests + 1),
        *((name, tokens, vocab_size) for name, tokens in resets),
    ):
        if ids.size and not 0 <= ids.min() <= ids.max() < count:
            raise ValueError(f"{name} must lie in 0..{count - 1}, got {ids.min()}..{ids.max()}")
