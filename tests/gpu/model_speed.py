"""How fast are whole steps? Random weights at real shapes: decode and prefill tokens/s against the roofline.

Owns building such a model without files. Roofline: bytes and FLOPs counted by tests/gpu/paper.py over the copy and
GEMM rates measured here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from minserve.backend.base import Peaks, StepLimits
from minserve.backend.cuda_backend.backend import CudaBackend
from minserve.backend.cuda_backend.program import CudaProgram
from minserve.backend.cuda_backend.weights import Matrix
from minserve.backend.tensor import Encoding, HostTensor
from minserve.batch import Batch
from minserve.models import load
from minserve.weights.dummy import PRESETS
from tests.gpu.machine import Target
from tests.gpu.paper import Load, PaperCheckpoint, PaperProgram, Work, sampling
from tests.gpu.report import Report, Table
from tests.gpu.speed import COMPUTE, Bench
from tests.helpers import Part, make_batch

CONTEXT, BATCHES = 1024, (1, 8, 64, 256)
COLUMNS = ("model", "batch", "tokens/s", "ms a step", "GPU ms", "host ms", "roofline ms", "of roofline")


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
    return backend.build(model.forward, model.spec, limits)


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


def decode(
    target: Target, running: CudaProgram, paper: PaperProgram, batch: int, peaks: Peaks, table: Table, name: str
) -> None:
    context = 40 if target.simulated else CONTEXT
    step, repeats = decode_batch(batch, context), 1 if target.simulated else 20
    whole = best(lambda: running.run(step), repeats)
    graph, stream = running._graphs[batch], running._stream

    def replays() -> None:
        for _ in range(repeats):
            graph.launch(stream)
        stream.synchronize()

    on_gpu = best(replays, 3) / repeats
    works = [*paper.works(Load([1] * batch, [context] * batch)), sampling(batch, paper.spec.vocab_size)]
    floor = roofline(works, peaks)
    milliseconds = (whole * 1e3, on_gpu * 1e3, (whole - on_gpu) * 1e3, floor * 1e3)
    table.rows.append((name, batch, batch / whole, *milliseconds, f"{floor / whole:.0%}"))


def prefill(
    target: Target, running: CudaProgram, paper: PaperProgram, tokens: int, peaks: Peaks, table: Table, name: str
) -> None:
    step = make_batch([Part(0, [i % 100 for i in range(tokens)], range(-(-tokens // 16)))])
    whole = best(lambda: running.run(step), 1 if target.simulated else 5)
    floor = roofline(paper.works(Load([tokens], [tokens])), peaks)
    table.rows.append((name, tokens, tokens / whole, whole * 1e3, floor * 1e3, f"{floor / whole:.0%}"))


def run(target: Target, peaks: Peaks, report: Report, presets: Sequence[str], spare: float) -> dict[str, Any]:
    """Returns {preset: {batch: tokens/s}}, for the comparison with a peer."""
    batches = (1, 2) if target.simulated else BATCHES
    chunks = (20,) if target.simulated else (512, 2048)
    context = 40 if target.simulated else CONTEXT
    decodes = report.table(f"Decode, {context} tokens in each cache", *COLUMNS)
    prefills = report.table("Prefill", "model", "tokens", "tokens/s", "ms", "roofline ms", "of roofline")
    reached: dict[str, dict[int, float]] = {}
    for preset in presets:
        paper = PaperProgram(preset, sms=int(target.cp.cuda.Device().attributes["MultiProcessorCount"]))
        for batch in batches:
            with report.section(f"{preset}, batch {batch}", needs=spare + (0 if target.simulated else 15)) as go:
                if not go:
                    continue
                most, longest = (max(chunks), max(context, *chunks)) if batch == 1 else (batch, context)
                kv = sum(4 * layer.kv_heads * layer.head_dim for layer in paper.spec.kv) * (longest + 64) * batch
                free = target.cp.cuda.Device().mem_info[0]
                if paper.spec.weight_bytes * 1.1 + kv + (2 << 30) > free and not target.simulated:
                    report.skip(f"{preset}, batch {batch}", f"{kv / 1e9:.0f} GB of KV don't fit")
                    continue
                running = build(target, preset, batch, most, longest)
                try:
                    decode(target, running, paper, batch, peaks, decodes, preset)
                    reached.setdefault(preset, {})[batch] = decodes.rows[-1][2]
                    if batch == 1:
                        for chunk in chunks:
                            prefill(target, running, paper, chunk, peaks, prefills, preset)
                finally:
                    running.close()
                    del running
                    target.cp.get_default_memory_pool().free_all_blocks()
    return reached
