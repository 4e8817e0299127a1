"""How fast are the kernels? Each alone, at Llama-3.1-8B's shapes, against a copy and a matrix product measured here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from minserve.backend.base import Peaks, StepLimits
from minserve.backend.cuda_backend.kernels import Kernels
from minserve.backend.cuda_backend.sampler import Sampler, adjusted_rows
from minserve.backend.cuda_backend.step import Shape, Staging
from tests.gpu.bench import Bench
from tests.gpu.cases import attention, products, rest, row_by_row
from tests.gpu.machine import Target
from tests.gpu.report import Report
from tests.helpers import Part, allow, make_batch, make_sampling


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
    for cases in (row_by_row, products, attention, rest):
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
    report.skip("speed of dequantize and copy_blocks alone", "part of products, of the copy")
    with report.section("speed: sampling") as go:
        if go:
            sampling(bench, report)


def sampling(b: Bench, report: Report) -> None:
    """Whole draws, launches and download included: what the host waits for after a step's logits."""
    table = report.table("Sampling, with launches and download", "rows", "settings", "us", "GB/s")
    vocab, most = (300, 2) if b.tiny else (128256, 64)
    limits = StepLimits(most, most, most, 16, 4)
    kernels = Kernels(b.cp)
    sampler, staging = Sampler(b.cp, kernels, limits, vocab), Staging(b.cp, limits, 16)
    kernels.compile()
    logits = b.cp.asarray((np.random.default_rng(0).standard_normal((most, vocab)) * 3).astype(np.float32))
    for rows in (1, most):
        for name, moved, fields in choices(rows, vocab):
            batch = make_batch([Part(0, [0], [0])] * rows, sampling=make_sampling(rows, **fields))
            adjusted = adjusted_rows(batch.sampling)
            at = staging.upload(batch, Shape(rows, rows, rows), adjusted, b.cp.cuda.get_current_stream())
            seconds = []
            for _ in range(1 if b.tiny else 20):
                began = time.perf_counter()
                sampler.wait(batch.sampling, sampler.draw(logits, batch, at, adjusted))
                seconds.append(time.perf_counter() - began)
            took = min(seconds)
            table.rows.append((rows, name, took * 1e6, rows * vocab * moved / took / 1e9))


def choices(rows: int, vocab: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Settings, and bytes that the kernels read and write for a word of the vocabulary: 4 a pass, 10 to adjust."""
    penalties = {"penalties": (0.5, 0.1, 1.2), "seats": range(rows)}
    half = allow(vocab, *[range(0, vocab, 2)] * rows)
    yield "greedy", 4, {}
    yield "temperature", 8, {"temperature": 1.0}
    yield "top_k, top_p", 32, {"temperature": 1.0, "top_k": 50, "top_p": 0.9}
    yield "penalties, bias", 14, penalties | {"bias": [{17: 1.5}] * rows}
    yield "mask", 14, {"mask": half}
    yield "20 log probabilities", 4 + 22 * 4, {"logprobs": 20}
