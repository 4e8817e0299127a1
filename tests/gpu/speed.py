"""How fast are the kernels? Each alone, at Llama-3.1-8B's shapes, against a copy and a matrix product measured here.

Owns the timing: launches are captured into a graph, so that host time doesn't count, and walk through more memory than
the L2 cache holds. On the emulator the same code runs at tiny shapes, to show that it works; its times mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minserve.backend.base import Heads, Peaks, StepLimits
from minserve.backend.cuda_backend import ops
from minserve.backend.cuda_backend.kernels import Kernels
from minserve.backend.cuda_backend.ops import Buffer, Machine
from minserve.backend.cuda_backend.sampler import Sampler, adjusted_rows
from minserve.backend.cuda_backend.step import Shape, Staging, Step
from minserve.backend.cuda_backend.weights import BITS, Matrix, Rope, chunks
from tests.gpu.machine import Target
from tests.gpu.report import Report
from tests.helpers import Part, make_batch, make_sampling

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
        size = 4 if kind == "float" else 2
        data = self.bytes(rows * cols * size).view(np.float32 if kind == "float" else np.uint16)
        return Buffer(kind, cols, False, data.reshape(rows, cols))

    def matrix(self, format: str, n: int, k: int, *, pairs: bool = False) -> Matrix:
        if format == "Dense":
            return Matrix(format, n, k, self.bytes(2 * n * k).reshape(n, 2 * k), pairs=pairs)
        groups = chunks(format, k) * 16 // BITS[format]
        data = self.bytes(n * chunks(format, k) * 64).reshape(n, -1)
        scales, minima = (self.bytes(2 * n * groups).view(np.float16).reshape(n, groups) for _ in range(2))
        return Matrix(format, n, k, data, scales, minima if format == "Int4Min" else None, pairs=pairs)

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


# ---- cases -----------------------------------------------------------------------
def step(tokens: int, inputs: dict[str, Any], longest: int = 1, requests: int = 1, rows: int = 0) -> Step:
    return Step(Shape(tokens, requests, rows), longest, longest == 1, inputs)


def products(b: Bench) -> Iterator[Case]:
    """Products of a layer and of the head, for few rows and for many."""
    d, f, v = (64, 96, 80) if b.tiny else (4096, 14336, 128256)
    shapes = (("qkv", 3 * d // 2, d), ("o", d, d), ("gate+up", 2 * f, d), ("down", d, f), ("head", v, d))
    for format in BITS:
        for rows in (1, 8, 16) if format != "Dense" else (1, 8, 64):
            for name, n, k in shapes:
                yield product(b, name, format, rows, n, k)
    for rows in (9,) if b.tiny else (256, 512, 2048):
        for name, n, k in shapes[:4]:
            yield product(b, name, "Dense", rows, n, k)
    for format in ("Int8", "Int4"):
        yield product(b, "gate+up", format, 17 if b.tiny else 512, 2 * f, d)


def product(b: Bench, name: str, format: str, rows: int, n: int, k: int) -> Case:
    glu, head = name == "gate+up", name == "head"
    launches: list[Launch] = []
    size = n * k * BITS[format] // 8
    x, wide = b.buffer(rows, k), b.buffer(rows, n) if glu else None
    out = b.buffer(rows, n // 2 if glu else n, "float" if head else COMPUTE)
    for _ in range(b.copies(size)):
        weight = b.matrix(format, n, k, pairs=glu)
        launches.append(launch(ops.Linear(b.m, out, x, weight, "silu" if glu else None, wide), step(rows, {})))
    moved = weight.nbytes + 2 * rows * k + rows * out.cols * (4 if head else 2)
    kind = "skinny_gemm" if rows <= ops.SKINNY_ROWS[format] else "cuBLAS"
    return Case(kind, f"{name} {format}, {rows} rows", moved, 2 * rows * n * k, launches)


def launch(instruction: ops.Instruction, at: Step) -> Launch:
    return lambda: instruction(at)


def attention(b: Bench) -> Iterator[Case]:
    """Decode: batches and contexts. Prefill: whole prompts, and a chunk on a long prefix."""
    full, small = Heads(32, 8, 128, 0.088), Heads(32, 8, 64, 0.125)
    if b.tiny:
        full = small = Heads(4, 2, 64, 0.125)
    decodes = ((2, 40),) if b.tiny else ((1, 1024), (1, 8192), (1, 65536), (8, 8192), (64, 1024), (64, 8192))
    for heads in (full, small):
        for batch, context in decodes:
            yield attend(b, heads, [1] * batch, [context] * batch)
    prompts = ((20, 20), (20, 60)) if b.tiny else ((512, 512), (2048, 2048), (8192, 8192), (2048, 32768))
    for heads in (full, small):
        for count, context in prompts:
            yield attend(b, heads, [count], [context])


def attend(b: Bench, h: Heads, counts: list[int], contexts: list[int]) -> Case:
    blocks = [-(-context // 16) for context in contexts]
    ends = np.cumsum(blocks)
    inputs = {
        "block_tables": b.ints(np.random.default_rng(1).permutation(ends[-1])),
        "table_starts": b.ints(ends - blocks),
        "context_lens": b.ints(contexts),
        "query_starts": b.ints(np.cumsum([0, *counts])),
    }
    tokens, size = sum(counts), int(ends[-1]) * 16 * h.kv * h.dim * 4
    qkv, out = b.buffer(tokens, h.cols), b.buffer(tokens, h.q * h.dim)
    parts = b.cp.empty(ops.Attention.part_words(b.m, h, len(counts)), np.float32)
    at = step(tokens, inputs, max(counts), len(counts))
    copies = b.copies(size) if max(counts) == 1 else 1
    caches = [b.bytes(size).view(np.uint16) for _ in range(copies)]
    launches = [launch(ops.Attention(b.m, out, qkv, h, cache, parts), at) for cache in caches]
    pairs = sum((2 * context - count + 1) * count // 2 for count, context in zip(counts, contexts, strict=True))
    moved = sum(contexts) * h.kv * h.dim * 4 + 4 * tokens * h.q * h.dim
    name = "decode_attention" if max(counts) == 1 else "prefill_attention"
    shape = f"{len(counts)} x {contexts[0]}" if max(counts) == 1 else f"{counts[0]} new of {contexts[0]}"
    return Case(name, f"D={h.dim}, {shape}", moved, 4 * h.q * h.dim * pairs, launches)


def row_by_row(b: Bench) -> Iterator[Case]:
    """Norms, rotation, activation, embedding."""
    d, f, v = (64, 96, 80) if b.tiny else (4096, 14336, 128256)
    h = Heads(4, 2, 16, 1.0) if b.tiny else Heads(32, 8, 128, 1.0)
    weight = ops.Scale(b.bytes(4 * d).view(np.float32), 1e-5)
    table, angles = b.matrix("Dense", v, d), b.bytes(4 * 8192 * h.dim // 2).view(np.float32).reshape(8192, h.dim // 2)
    cache = b.bytes(8192 * h.kv * h.dim * 4).view(np.uint16)
    for rows in (1, 3) if b.tiny else (1, 64, 4096):
        x, branch, out = b.buffer(rows, d, "float"), b.buffer(rows, d), b.buffer(rows, d)
        add_norm = launch(ops.Norm(b.m, out, x, weight, branch), step(rows, {}))
        yield Case("rms_norm", f"{rows} rows", rows * d * 12, 0, [add_norm] * 8)
        ids = {"token_ids": b.ints(np.arange(rows) % v)}
        yield Case(
            "embed", f"{rows} rows", rows * d * 6, 0, [launch(ops.Embed(b.m, x, table, 1.0), step(rows, ids))] * 8
        )
        wide, gated = b.buffer(rows, 2 * f), b.buffer(rows, f)
        yield Case(
            "glu", f"{rows} rows", rows * f * 6, 0, [launch(ops.Glu(b.m, gated, wide, "silu"), step(rows, {}))] * 8
        )
        qkv, at = b.buffer(rows, h.cols), b.ints(np.arange(rows))
        rotate = ops.RopeKV(b.m, qkv, h, Rope(angles, angles, h.dim // 2, 8192), cache)
        places = step(rows, {"positions": at, "slots": at})
        yield Case("rope_kv", f"{rows} rows", rows * h.cols * 4, 0, [launch(rotate, places)] * 8)


def run(target: Target, peaks: Peaks, report: Report, spare: float) -> None:
    """spare: seconds to leave for what comes after."""
    table = report.table(
        "Kernels at the shapes of Llama-3.1-8B, bfloat16",
        "kernel",
        "shape",
        "us",
        "GB/s",
        "of copy",
        "TFLOP/s",
        "of GEMM",
    )
    bench = Bench(target)
    for cases in (row_by_row, products, attention):
        with report.section(f"speed: {cases.__name__}") as go:
            if not go:
                continue
            for case in cases(bench):
                if report.left < spare:
                    report.skip(f"speed of {case.name}, {case.shape} and what follows it", "no time left")
                    break
                took = bench.seconds(case.launches)
                rate, speed = case.bytes / took, case.flops / took
                shares = f"{rate / peaks.bandwidth:.0%}", f"{speed / peaks.flops:.0%}"
                table.rows.append((case.name, case.shape, took * 1e6, rate / 1e9, shares[0], speed / 1e12, shares[1]))
    with report.section("speed: sampling") as go:
        if go:
            sampling(bench, report)


def sampling(b: Bench, report: Report) -> None:
    """Whole draws, launches and download included: what the host waits for after a step's logits."""
    table = report.table("Sampling, with launches and download", "rows", "settings", "us")
    vocab, most = (300, 2) if b.tiny else (128256, 64)
    limits = StepLimits(most, most, most, 16, 4)
    kernels = Kernels(b.cp)
    sampler, staging = Sampler(b.cp, kernels, limits, vocab), Staging(b.cp, limits, 16)
    kernels.compile()
    logits = b.cp.asarray((np.random.default_rng(0).standard_normal((most, vocab)) * 3).astype(np.float32))
    choices: dict[str, dict[str, Any]] = {
        "greedy": {},
        "temperature": {"temperature": 1.0},
        "top_k, top_p": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
        "20 log probabilities": {"logprobs": 20},
    }
    for rows in (1, most):
        for name, fields in choices.items():
            batch = make_batch([Part(0, [0], [0])] * rows, sampling=make_sampling(rows, **fields))
            adjusted = adjusted_rows(batch.sampling)
            at = staging.upload(batch, Shape(rows, rows, rows), adjusted, b.cp.cuda.get_current_stream())
            seconds = []
            for _ in range(1 if b.tiny else 20):
                began = time.perf_counter()
                sampler.draw(logits, batch, at, adjusted)
                seconds.append(time.perf_counter() - began)
            table.rows.append((rows, name, min(seconds) * 1e6))
