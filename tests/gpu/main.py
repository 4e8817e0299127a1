"""scripts/gpu_check: one command for the day a GPU is there. See --help."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minserve.backend.base import BackendError, Peaks
from tests.gpu import correctness, machine, model_speed, speed
from tests.gpu.machine import Target
from tests.gpu.report import Report

ROOT = Path(__file__).parents[2]
SECONDS = 350  # all together
PRESETS = ("llama-1b", "llama-8b")
PEER_SECONDS = 45  # that a preset of the peer's needs at least: to import, and to compile for one batch


def facts(target: Target, report: Report) -> None:
    report.facts["machine"] = f"{platform.node()}, {platform.machine()}, Python {platform.python_version()}"
    report.facts["device"] = target.backend("bf16").description
    if not target.simulated:
        runtime = target.cp.cuda.runtime
        report.facts["driver, runtime"] = f"{runtime.driverGetVersion()}, {runtime.runtimeGetVersion()}"
    report.facts["commit"] = commit()


def commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:  # no git in a bare image
        return "unknown"


def ask_peer(preset: str, seconds: float) -> tuple[list[dict[str, Any]], str]:
    """torch_peer's line for each batch that it got to, from the smallest on, and why there are no more of them."""
    batches, context = model_speed.BATCHES, model_speed.CONTEXT
    ask = {"preset": preset, "batches": batches, "context": context, "device": "cuda"}
    command = [sys.executable, "-m", "tests.gpu.torch_peer", json.dumps(ask)]
    try:
        done = subprocess.run(command, capture_output=True, cwd=ROOT, timeout=seconds)
        printed = done.stdout
        why = f"it failed: {(done.stderr.decode().strip().splitlines() or ['?'])[-1]}" if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        printed, why = late.stdout or b"", f"it took longer than {seconds:.0f} s"
    return [json.loads(line) for line in printed.decode().splitlines() if line.startswith("{")], why


def peers(report: Report, reached: Mapping[str, Mapping[int, float]]) -> None:
    """Decode and prefill tokens/s of PyTorch + transformers beside ours."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        report.skip("PyTorch + transformers", "not installed")
        return
    prefill = f"their prefill, {model_speed.CONTEXT} tokens each"
    columns = "model", "batch", "our decode", "theirs", "ratio", prefill
    table = report.table("Tokens/s against PyTorch + transformers", *columns)
    for number, preset in enumerate(PRESETS):
        with report.section(f"PyTorch: {preset}", needs=PEER_SECONDS) as go:
            if not go:
                continue
            answers, why = ask_peer(preset, max(1, report.left - 5) / (len(PRESETS) - number))
            for answer in answers:
                batch, theirs = answer["batch"], answer["decode"]
                ours = reached.get(preset, {}).get(batch)
                report.facts["peer"] = answer["versions"]
                table.rows.append((preset, batch, ours, theirs, ours / theirs if ours else None, answer["prefill"]))
            if why:
                left = [str(batch) for batch in model_speed.BATCHES[len(answers) :]]
                report.skip(f"PyTorch: {preset}, batches {', '.join(left)}", why)


def measure(target: Target, report: Report) -> None:
    with report.section("peaks: a copy and a matrix product") as go:
        if not go:
            return
        peaks = target.backend("bf16").peaks()
        report.facts["measured peaks"] = f"{peaks.bandwidth / 1e9:,.0f} GB/s, {peaks.flops / 1e12:,.1f} TFLOP/s"
        speed.run(target, peaks, report, spare=180)
        reached = model_speed.run(target, peaks, report, PRESETS, spare=len(PRESETS) * PEER_SECONDS + 5)
        peers(report, reached)


def rehearse(target: Target, report: Report) -> None:
    """Run what `measure` runs, at tiny shapes, and drop the numbers: times on the emulator mean nothing."""
    kept = len(report.tables)
    peaks = Peaks(1e12, 1e14)
    speed.run(target, peaks, report, spare=0)
    model_speed.run(target, peaks, report, ("llama-tiny",), spare=0)
    del report.tables[kept:]
    report.skip("all speeds", "this is the emulator: the code ran, its times mean nothing")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_check",
        description="Checks the CUDA backend on this machine's GPU and measures it: kernels against NumPy, graph "
        "replay against eager launches, tokens of whole models, then speeds against this card's own copy and GEMM "
        "rates and against PyTorch + transformers. Needs NumPy and CuPy, for the comparison PyTorch and transformers.",
    )
    parser.add_argument("--simulate", action="store_true", help="run on the CPU emulator instead: correctness only")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu_check"), help="folder for gpu_check.json and gpu_check.md"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for everything (default %(default)s)")
    options = parser.parse_args(arguments)
    report = Report(options.seconds)
    try:
        target = machine.emulator() if options.simulate else machine.gpu()
    except (BackendError, RuntimeError) as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    facts(target, report)
    correctness.run(target, report)
    (rehearse if options.simulate else measure)(target, report)
    report.write(options.out)
    print(f"{len(report.failures)} failures, {len(report.skipped)} skipped; {options.out}/gpu_check.md")
    return int(bool(report.failures))
