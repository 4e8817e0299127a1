"""How fast are whole steps? Random weights at real shapes: decode and prefill tokens/s against the roofline.

Owns building such a model without files. Roofline: bytes and FLOPs counted by tests/gpu/paper.py over the copy and
GEMM rates measured here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from minserve.backend.base import Peaks, StepLimits
from minserve.backend.cuda_backend.backend import CudaBackend
from minserve.backend.cuda_backend.program import CudaProgram
from minserve.backend.cuda_backend.weights import Matrix
from minserve.backend.tensor import Encoding, HostTensor
from minserve.batch import Batch
from minserve.batch_build import build_batch
from minserve.models import load
from minserve.request import Chunk, Pool, Request, SamplingParams, StepPlan
from minserve.weights.dummy import PRESETS
from tests.gpu.bench import COMPUTE, Bench
from tests.gpu.machine import Target
from tests.gpu.paper import Load, PaperCheckpoint, PaperProgram, Work, sampling
from tests.gpu.report import Report, Table
from tests.helpers import Part, make_batch

CONTEXT, BATCHES = 1024, (1, 8, 64, 256)
DECODE = ("model", "batch", "tokens/s", "ms a step", "host ms", "graph ms", "sampling ms", "roofline ms", "of roofline")
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


def decoding(batch: int, context: int) -> tuple[StepPlan, dict[str, Request]]:
    """A step in which each of so many requests computes its last known token."""
    each, params = -(-(context + 64) // 16), SamplingParams(max_tokens=64, temperature=0.0)
    requests = {
        f"{r}": Request(f"{r}", f"{r}", 0, Pool.INTERACTIVE, 0, context, [5] * context, params, seed=0, arrival=0.0,
                        computed=context - 1, blocks=[*range(each * r, each * (r + 1))], seat=r)
        for r in range(batch)
    }  # fmt: skip
    return StepPlan(0, tuple(Chunk(name, context - 1, 1, samples=1) for name in requests)), requests


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


class Marked:
    """A graph between two events."""

    def __init__(self, cp: Any, graph: Any) -> None:
        self._graph, self.before, self.after = graph, cp.cuda.Event(), cp.cuda.Event()

    def launch(self, stream: Any) -> None:
        stream.record(self.before)
        self._graph.launch(stream)
        stream.record(self.after)


class Times(NamedTuple):
    """Seconds of a decode step. whole: until the host has its tokens. host: by its own clock, until it waits: to lay
    out the batch, stage and launch. graph, sampling: on the device, between events, the latter with its download."""

    whole: float
    host: float
    graph: float
    sampling: float


def decode_step(cp: Any, running: CudaProgram, batch: int, context: int) -> Times:
    plan, requests = decoding(batch, context)
    graphs, finished = running._graphs, cp.cuda.Event()
    marked, graph = Marked(cp, graphs[batch]), graphs[batch]
    graphs[batch] = marked
    began = time.perf_counter()
    step = build_batch(plan, requests, block_size=16, vocab_size=running._spec.vocab_size, copies=())
    with running._stream as stream:
        described = running.queue(step)
        host = time.perf_counter() - began
        stream.record(finished)
        running._sampler.wait(step.sampling, described)
    whole = time.perf_counter() - began
    graphs[batch] = graph
    on_device = (cp.cuda.get_elapsed_time(*pair) / 1e3 for pair in pairwise((marked.before, marked.after, finished)))
    return Times(whole, host, *on_device)


def decode(cp: Any, s: Subject, context: int, table: Table) -> float:
    """Tokens/s of the best step."""
    times = min(decode_step(cp, s.running, s.batch, context) for _ in range(1 if s.simulated else 20))
    works = [*s.paper.works(Load([1] * s.batch, [context] * s.batch)), sampling(s.batch, s.paper.spec.vocab_size)]
    floor, rate = roofline(works, s.peaks), s.batch / times.whole
    milliseconds = (seconds * 1e3 for seconds in (*times, floor))
    table.rows.append((s.name, s.batch, rate, *milliseconds, f"{floor / times.whole:.0%}"))
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
                    reached.setdefault(preset, {})[batch] = decode(target.cp, subject, context, decodes)
                    for chunk in chunks:
                        prefill(subject, chunk, prefills)
                finally:
                    running.close()
                    del running, subject
                    target.cp.get_default_memory_pool().free_all_blocks()
    return reached
