"""One kernel's speed: device memory to work on, and the time of a launch.

Owns the timing: launches are captured into a graph, so that host time doesn't count, and walk through more memory than
the L2 cache holds. On the emulator the same code runs at tiny shapes, to show that it works; its times mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minserve.backend.base import StepLimits
from minserve.backend.cuda_backend import ops
from minserve.backend.cuda_backend.kernels import DTYPES
from minserve.backend.cuda_backend.ops import Buffer, Machine
from minserve.backend.cuda_backend.step import Shape, Step
from minserve.backend.cuda_backend.weights import Matrix
from tests.gpu.machine import Target

COMPUTE, TILE = "bf16", 1 << 16
Launch = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """One kernel at one shape: what it must move and compute, and a launch for each of several copies of its data."""

    name: str
    shape: str
    bytes: int
    flops: int
    launches: Sequence[Launch]


class Bench:
    """tiny: the emulator's shapes."""

    def __init__(self, target: Target) -> None:
        self.cp, self.tiny = target.cp, target.simulated
        backend = target.backend(COMPUTE)
        self.m: Machine = backend.machine(StepLimits(8192, 256, 256, 131072, 1))
        self.cache_bytes = 4 * int(backend._device.attributes.get("L2CacheSize", 1 << 20))
        self._fill = self.m.kernels.get("copy_blocks", "copy_blocks")
        self.m.kernels.compile()

    # -- data ----------------------------------------------------------------------
    def bytes(self, size: int) -> Any:
        """Device memory full of bfloat16 numbers between 0.5 and 2: zeros would draw less power."""
        tiles = -(-size // TILE)
        memory = self.cp.empty(tiles * TILE, np.uint8)
        numbers = np.random.default_rng(0).integers(0x3F00, 0x4000, TILE // 2, np.uint16)
        memory[:TILE].set(numbers.view(np.uint8))
        if tiles > 1:
            arrays = np.array([memory.data.ptr], np.uint64), np.array([TILE], np.int32)
            pairs = np.stack([np.zeros(tiles - 1), np.arange(1, tiles)], 1).astype(np.int32)
            arguments = [self.cp.asarray(array) for array in (*arrays, np.ascontiguousarray(pairs))]
            self._fill((tiles - 1, 1), 256, *arguments)
        self.cp.cuda.get_current_stream().synchronize()
        return memory[:size]

    def copies(self, size: int) -> int:
        """How many copies of so much data don't fit into the cache together."""
        return 1 if self.tiny else max(2, min(64, -(-self.cache_bytes // max(size, 1))))

    def buffer(self, rows: int, cols: int, kind: str = COMPUTE) -> Buffer:
        dtype = DTYPES[kind]
        data = self.bytes(rows * cols * dtype.itemsize).view(dtype)
        return Buffer(kind, cols, False, data.reshape(rows, cols))

    def matrix(self, format: str, n: int, k: int, *, pairs: bool = False) -> Matrix:
        def new(shape: tuple[int, int], dtype: type) -> Any:
            return self.bytes(shape[0] * shape[1] * np.dtype(dtype).itemsize).view(dtype).reshape(shape)

        return Matrix.make(new, format, n, k, pairs=pairs)

    def ints(self, values: Any) -> Any:
        return self.cp.asarray(np.ascontiguousarray(values, np.int32))

    # -- timing --------------------------------------------------------------------
    def seconds(self, launches: Sequence[Launch]) -> float:
        """Of one launch. All of them are one graph, replayed until there is something to measure."""
        self.m.kernels.compile()
        with self.cp.cuda.Stream(non_blocking=True) as stream:
            self.cp.cuda.Device().synchronize()
            for launch in launches:
                launch()
            stream.synchronize()
            stream.begin_capture()
            for launch in launches:
                launch()
            graph = stream.end_capture()
            replays, best = 1, float("inf")
            for _ in range(1 if self.tiny else 5):
                began = time.perf_counter()
                for _ in range(replays):
                    graph.launch(stream)
                stream.synchronize()
                took = time.perf_counter() - began
                best = min(best, took / replays)
                replays = max(1, min(200, int(5e-3 / best)))  # 5 ms at a time
        return best / len(launches)


def step(tokens: int, inputs: dict[str, Any], longest: int = 1, requests: int = 1, rows: int = 0) -> Step:
    return Step(Shape(tokens, requests, rows), longest, longest == 1, inputs)


def launch(instruction: ops.Instruction, at: Step) -> Launch:
    return lambda: instruction(at)
