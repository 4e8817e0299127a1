"""Does the GPU compute what NumPy does? Kernels, graphs, and tokens of whole models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minserve.backend.base import Backend, Program, StepLimits
from minserve.backend.numpy_backend import NumpyBackend
from minserve.batch import StepResult
from minserve.batch_build import build_batch
from minserve.models import load
from minserve.policy.limits import Limits, PoolLimits
from minserve.request import Pool, SamplingParams, Submission, TokenEvent
from minserve.runner import Runner
from minserve.scheduler import Scheduler
from minserve.weights.dummy import load_dummy
from tests.gpu.machine import Target
from tests.gpu.report import Report
from tests.helpers import Part, make_batch
from tests.simt import checks_attention, checks_linear, checks_rows, checks_sampling
from tests.simt.witness import SURE, Witness

CHECKS = checks_rows.CHECKS | checks_linear.CHECKS | checks_attention.CHECKS | checks_sampling.CHECKS
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "phi3")
LIMITS = Limits(
    block_size=16,
    num_blocks=10,
    max_seqs=4,
    max_step_tokens=48,
    chunk_tokens=32,
    max_rows=24,
    watermark_blocks=1,
    pools={pool: PoolLimits(4, 1.0, 1.0) for pool in Pool},
)
STEP_LIMITS = StepLimits(max_tokens=48, max_requests=4, max_rows=24, max_model_len=128, num_blocks=10)


def kernels(machine: Target, report: Report, every: int) -> None:
    """Every `every`-th check, in both types, against float64."""
    table = report.table("Kernels against NumPy in float64", "type", "checks", "failed")
    for compute in ("half", "bf16"):
        kit, names = machine.kit(compute), list(CHECKS)[::every]
        failed = 0
        for name in names:
            try:
                CHECKS[name](kit)
            except Exception as error:
                failed += 1
                report.fail(f"{name} ({compute}): {error or type(error).__name__}")
        table.rows.append((compute, len(names), failed))
    if every > 1:
        report.skip(f"{len(CHECKS) - len(list(CHECKS)[::every])} kernel checks", "one in a few is enough here")


# Seats enough for the buckets whose products are cuBLAS's, and those that expand quantized weights first.
GRAPH_LIMITS = StepLimits(max_tokens=48, max_requests=26, max_rows=26, max_model_len=128, num_blocks=26)


def program(backend: Backend, model: str, limits: StepLimits = STEP_LIMITS) -> Program:
    loaded = load(load_dummy(model).checkpoint, backend, limits.max_model_len)
    return backend.build(loaded.forward, loaded.spec, limits)


def graphs(machine: Target, report: Report) -> None:
    """A replayed step against the same step launch by launch, in buckets of every kind."""
    table = report.table("Graph replay against eager launches", "weights", "largest difference of a logit")
    for encoding in ("F16", "Q4_0"):
        model = f"dummy:llama-tiny:{encoding}"
        replayed, eager = (program(machine.backend("half", graphs=on), model, GRAPH_LIMITS) for on in (True, False))
        worst = 0.0
        for step in range(2):
            for requests in (1, 3, 4, 8, 17, 26):
                parts = [Part(step, [step + 7 * r], [r]) for r in range(requests)]
                a, b = (each.logits(make_batch(parts)) for each in (replayed, eager))
                worst = max(worst, float(np.abs(a - b).max()))
        table.rows.append((encoding, worst))
        if worst > 1e-3:
            report.fail(f"graph replay of {encoding} weights differs from eager launches by {worst}")


def submissions() -> list[Submission]:
    """Longer than the cache holds at once: chunked, preempted, batched, forked, penalized, seeded."""
    shared = [(i * 37 + 11) % 256 for i in range(35)]

    def ask(name: str, tail: int, n: int = 1, **params: Any) -> Submission:
        prompt = (*shared, *((i * i * 7 + tail) % 256 for i in range(tail)))
        return Submission(name, prompt, SamplingParams(**({"max_tokens": 24, "temperature": 0.0} | params)), n=n)

    return [
        ask("greedy", 20),
        ask("seeded", 9, temperature=0.3, seed=5),
        ask("forked", 3, n=2, temperature=0.3, seed=9, max_tokens=8),
        ask("penalized", 30, repetition_penalty=1.3, frequency_penalty=0.4),
        ask("biased", 1, logit_bias={17: 1.5, 200: -3.0}),
    ]


def generate(running: Program, spec: Any) -> tuple[dict[str, list[int]], dict[str, list[float]], int]:
    """Tokens by request; how sure a Witness was of each; how many requests were preempted."""
    scheduler = Scheduler(LIMITS, weights_id=b"check")
    runner = Runner(running, spec, None, 1.0)  # type: ignore[arg-type]  # only `run` is used
    tokens: dict[str, list[int]] = {}
    sure: dict[str, list[float]] = {}
    preempted = 0
    for number, each in enumerate(submissions()):
        scheduler.submit(each, seed=each.params.seed or 7, now=float(number))
    while scheduler.has_work:
        plan = scheduler.plan()
        preempted += len(plan.preempted)
        sizes = {"block_size": LIMITS.block_size, "vocab_size": spec.vocab_size}
        batch = build_batch(plan, scheduler.requests, **sizes, copies=scheduler.copies())
        result = runner.run(plan, batch) if plan.chunks else StepResult(())
        row = 0
        for chunk in plan.chunks:
            for name in (*[chunk.request_id] * chunk.samples, *chunk.forks):
                if isinstance(running, Witness):
                    sure.setdefault(name, []).append(running.rows[row])
                row += 1
        events: Sequence[TokenEvent] = scheduler.commit(plan, result)
        for event in events:
            if event.token_id >= 0:
                tokens.setdefault(event.request_id, []).append(event.token_id)
    return tokens, sure, preempted


def tokens(machine: Target, report: Report, models: Sequence[tuple[str, str]]) -> None:
    """(model, compute type): the tokens of the scheduler on the GPU and on NumPy."""
    table = report.table("Tokens against the NumPy backend", "model", "type", "compared", "differ", "preempted")
    for model, compute in models:
        reference = NumpyBackend()
        loaded = load(load_dummy(model).checkpoint, reference, STEP_LIMITS.max_model_len)
        witness = Witness(loaded.forward, loaded.spec, STEP_LIMITS, reference.block_size)
        want, sure, _ = generate(witness, loaded.spec)
        got, _, preempted = generate(program(machine.backend(compute), model), loaded.spec)
        compared, differ = 0, 0
        for name, expected in want.items():
            for i, token in enumerate(expected):
                if sure[name][i] <= SURE[compute]:
                    break
                compared += 1
                if got.get(name, [])[i : i + 1] != [token]:
                    differ += 1
                    report.fail(f"{model} ({compute}), {name}: {got.get(name)} instead of {expected}")
                    break
        table.rows.append((model, compute, compared, differ, preempted))


def models(simulated: bool) -> list[tuple[str, str]]:
    families = [(f"dummy:{family}-tiny:F16", "half") for family in FAMILIES]
    encodings = [("BF16", "bf16"), ("Q8_0", "half"), ("Q4_0", "half"), ("Q4_1", "half"), ("Q5_1", "half")]
    return (
        families[:1] + families[3:4] if simulated else families + [(f"dummy:llama-tiny:{e}", t) for e, t in encodings]
    )


def run(machine: Target, report: Report) -> None:
    with report.section("kernels against NumPy") as go:
        if go:
            kernels(machine, report, every=12 if machine.simulated else 1)
    with report.section("graph replay against eager launches") as go:
        if go:
            graphs(machine, report)
    with report.section("tokens of whole models") as go:
        if go:
            tokens(machine, report, models(machine.simulated))
