"""How fast are whole steps? Random weights at real shapes: decode and prefill tokens/s against the roofline.

Owns building such a model without files. Roofline: bytes and FLOPs counted by tests/gpu/paper.py over the copy and
GEMM rates measured here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minserve.backend.base import Peaks, StepLimits
from minserve.backend.cuda_backend.backend import CudaBackend
from minserve.backend.cuda_backend.program import CudaProgram
from minserve.backend.cuda_backend.weights import Matrix
from minserve.backend.tensor import Encoding, HostTensor
from minserve.batch import Batch
from minserve.models import load
from minserve.weights.dummy import PRESETS
from tests.gpu.bench import COMPUTE, Bench
from tests.gpu.machine import Target
from tests.gpu.paper import Load, PaperCheckpoint, PaperProgram, Work, sampling
from tests.gpu.report import Report, Table
from tests.helpers import Part, make_batch

CONTEXT, BATCHES = 1024, (1, 8, 64, 256)
DECODE = ("model", "batch", "tokens/s", "ms a step", "ms in the graph", "ms outside", "roofline ms", "of roofline")
PREFILL = ("model", "prompts", "tokens in all", "tokens/s", "ms", "roofline ms", "of roofline")


class RandomBackend(CudaBackend):
    """Weights appear on the device; a checkpoint gives their shapes only."""

    bench: Bench

    def prepare_linear(self, tensors: Sequence[HostTensor], bias: Any = None, *, pairs: bool = False) -> Matrix:
        return self.bench.matrix("Dense", sum(t.rows for t in tensors), tensors[0].cols, pairs=pairs)


def build(target: Target, preset: str, batch: int, chunk: int, context: int) -> CudaProgram:
    backend = RandomBackend(target.cp, target.blas, compute=COMPUTE)
    backend.bench = Bench(target)
    model = load(PaperCheckpoint(PRESETS[preset], Encoding.BF16), backend, context + 64)
    blocks = batch * -(-(context + 64) // backend.block_size)
    limits = StepLimits(max(batch, chunk), batch, batch, context + 64, blocks)
    running = backend.build(model.forward, model.spec, limits)
    for cache in running._caches:
        cache.fill(0x3F80)  # 1 as a bfloat16: decoding reads what no prompt has written
    target.cp.cuda.Device().synchronize()
    return running


def prompts(batch: int, each: int) -> Batch:
    blocks = -(-each // 16)
    tokens = [i % 100 for i in range(each)]
    return make_batch([Part(0, tokens, range(blocks * r, blocks * (r + 1)), seat=r) for r in range(batch)])


def decode_batch(batch: int, context: int) -> Batch:
    each = -(-(context + 64) // 16)
    return make_batch([Part(context - 1, [5], range(each * r, each * (r + 1)), seat=r) for r in range(batch)])


def best(work: Any, repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def roofline(works: Sequence[Work], peaks: Peaks) -> float:
    """Seconds at the measured rates, every launch as if alone."""
    return sum(max(work.bytes / peaks.bandwidth, work.flops / peaks.flops) for work in works)


@dataclass(frozen=True)
class Subject:
    """A program for `batch` requests, the same on paper, and what it is measured against."""

    name: str
    running: CudaProgram
    paper: PaperProgram
    batch: int
    peaks: Peaks
    simulated: bool


def decode(s: Subject, context: int, table: Table) -> float:
    """Tokens/s. Outside of the graph are the host's work and sampling, whose kernels follow it."""
    step, repeats = decode_batch(s.batch, context), 1 if s.simulated else 20
    whole = best(lambda: s.running.run(step), repeats)
    graph, stream = s.running._graphs[s.batch], s.running._stream

    def replays() -> None:
        for _ in range(repeats):
            graph.launch(stream)
        stream.synchronize()

    on_gpu = best(replays, 3) / repeats
    works = [*s.paper.works(Load([1] * s.batch, [context] * s.batch)), sampling(s.batch, s.paper.spec.vocab_size)]
    floor, rate = roofline(works, s.peaks), s.batch / whole
    milliseconds = (whole * 1e3, on_gpu * 1e3, (whole - on_gpu) * 1e3, floor * 1e3)
    table.rows.append((s.name, s.batch, rate, *milliseconds, f"{floor / whole:.0%}"))
    return rate


def prefill(s: Subject, tokens: int, table: Table) -> None:
    """A step of so many tokens, as prompts of the same length."""
    each = tokens // s.batch
    step = prompts(s.batch, each)
    whole = best(lambda: s.running.run(step), 1 if s.simulated else 5)
    floor = roofline(s.paper.works(Load([each] * s.batch, [each] * s.batch)), s.peaks)
    table.rows.append((s.name, s.batch, tokens, tokens / whole, whole * 1e3, floor * 1e3, f"{floor / whole:.0%}"))


def run(target: Target, peaks: Peaks, report: Report, presets: Sequence[str], spare: float) -> dict[str, Any]:
    """Returns {preset: {batch: tokens/s}}, for the comparison with a peer."""
    batches = (1, 2) if target.simulated else BATCHES
    chunks = (20,) if target.simulated else (512, 2048)
    context = 40 if target.simulated else CONTEXT
    decodes = report.table(f"Decode, {context} tokens in each cache", *DECODE)
    prefills = report.table("Prefill in one step", *PREFILL)
    reached: dict[str, dict[int, float]] = {}
    for preset in presets:
        paper = PaperProgram(preset, sms=int(target.cp.cuda.Device().attributes["MultiProcessorCount"]))
        for batch in batches:
            with report.section(f"{preset}, batch {batch}", needs=spare + (0 if target.simulated else 15)) as go:
                if not go:
                    continue
                longest = max(context, *(chunk // batch for chunk in chunks))
                kv = sum(4 * layer.kv_heads * layer.head_dim for layer in paper.spec.kv) * (longest + 64) * batch
                target.cp.get_default_memory_pool().free_all_blocks()
                needed, free = paper.spec.weight_bytes * 1.1 + kv + (2 << 30), target.cp.cuda.Device().mem_info[0]
                if needed > free and not target.simulated:
                    why = f"{needed / 1e9:.0f} GB needed, {kv / 1e9:.0f} of them for KV; {free / 1e9:.0f} GB free"
                    report.skip(f"{preset}, batch {batch}", why)
                    continue
                running = build(target, preset, batch, max(chunks), longest)
                subject = Subject(preset, running, paper, batch, peaks, target.simulated)
                try:
                    reached.setdefault(preset, {})[batch] = decode(subject, context, decodes)
                    for chunk in chunks:
                        prefill(subject, chunk, prefills)
                finally:
                    running.close()
                    del running, subject
                    target.cp.get_default_memory_pool().free_all_blocks()
    return reached
