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

from minserve.backend.base import BackendError, Peaks
from tests.gpu import correctness, machine, model_speed, speed
from tests.gpu.machine import Target
from tests.gpu.report import Report

ROOT = Path(__file__).parents[2]
SECONDS = 350  # all together
PRESETS = ("llama-1b", "llama-8b")
PEER = {"llama-1b": (1, 64), "llama-8b": (1, 64)}  # batches that the peer is asked for
PEER_SECONDS = 75  # for a preset: mostly compilation


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


def peers(report: Report, reached: Mapping[str, Mapping[int, float]]) -> None:
    """Decode tokens/s of PyTorch + transformers beside ours."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        report.skip("PyTorch + transformers", "not installed")
        return
    report.skip("PyTorch at batches 8 and 256, and its prefill", "compiling each takes too long")
    table = report.table("Decode tokens/s against PyTorch + transformers", "model", "batch", "ours", "theirs", "ratio")
    for preset, batches in PEER.items():
        with report.section(f"PyTorch: {preset}", needs=PEER_SECONDS) as go:
            if not go:
                continue
            ask = {"preset": preset, "batches": list(batches), "context": model_speed.CONTEXT, "device": "cuda"}
            command = [sys.executable, "-m", "tests.gpu.torch_peer", json.dumps(ask)]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, cwd=ROOT, timeout=max(1, report.left - 5)
                )
            except subprocess.TimeoutExpired:
                report.skip(f"PyTorch: {preset}", "it took longer than the time left")
                continue
            if done.returncode:
                report.skip(f"PyTorch: {preset}", f"it failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
                continue
            answer = json.loads(done.stdout.strip().splitlines()[-1])
            report.facts["peer"] = answer["versions"]
            for batch, theirs in answer["rates"].items():
                ours = reached.get(preset, {}).get(int(batch))
                table.rows.append((preset, batch, ours, theirs, ours / theirs if ours else None))


def measure(target: Target, report: Report) -> None:
    with report.section("peaks: a copy and a matrix product") as go:
        if not go:
            return
        peaks = target.backend("bf16").peaks()
        report.facts["measured peaks"] = f"{peaks.bandwidth / 1e9:,.0f} GB/s, {peaks.flops / 1e12:,.1f} TFLOP/s"
        speed.run(target, peaks, report, spare=180)
        reached = model_speed.run(target, peaks, report, PRESETS, spare=60)
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
