"""scripts/gpu_check, rehearsed: its correctness part on the emulator, its report, and what it says without a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from minserve.backend.base import BackendError, Peaks
from minserve.backend.cuda_backend import availability
from minserve.backend.cuda_backend.kernels import Kernel
from minserve.backend.cuda_backend.step import Shape, Step
from minserve.backend.tensor import Encoding
from minserve.batch_build import build_batch
from tests.gpu import correctness, machine, main, model_speed, paper, predict, speed, torch_peer
from tests.gpu.report import Report
from tests.simt import build, fakecupy, fakestream
from tests.simt.emulator import SimKernel
from tests.simt.instances import INSTANCES

needs_emulator = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))


@pytest.mark.simt
@needs_emulator
def test_the_whole_command_on_the_emulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels, graphs and tokens agree; every line that measures has run, and reports no number."""
    timed, measure, call = set[str](), speed.run, Kernel.__call__

    def launched(kernel: Kernel, *arguments: Any, **options: Any) -> None:
        timed.add(kernel.name.split("<")[0])
        call(kernel, *arguments, **options)

    def watched(*arguments: Any, **options: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Kernel, "__call__", launched)
            measure(*arguments, **options)

    monkeypatch.setattr(speed, "run", watched)
    assert main.main(["--simulate", "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "gpu_check.json").read_text())
    assert data["failures"] == []
    assert timed == {name.split("<")[0] for names in INSTANCES.values() for name in names}, "a kernel has no time"
    titles = [table["title"] for table in data["tables"]]
    assert titles == [
        "Kernels against NumPy in float64",
        "Graph replay against eager launches",
        "Tokens against the NumPy backend",
    ]
    rows: dict[str, Any] = {table["title"]: table["rows"] for table in data["tables"]}
    assert all(compared > 50 and not differ for _, _, compared, differ, _ in rows[titles[2]])
    assert any("times mean nothing" in line for line in data["skipped"])
    assert "SIMT emulator" in (tmp_path / "gpu_check.md").read_text()
    assert "0 failures" in capsys.readouterr().out


@pytest.mark.simt
@needs_emulator
def test_a_wrong_kernel_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(kit: Any) -> None:
        raise AssertionError("3 instead of 4")

    monkeypatch.setattr(correctness, "CHECKS", {"broken": broken})
    report = Report(100, say=lambda line: None)
    correctness.kernels(machine.emulator(), report, every=1)
    assert report.failures == ["broken (half): 3 instead of 4", "broken (bf16): 3 instead of 4"]


@pytest.mark.simt
@needs_emulator
def test_every_batch_has_a_rate_of_decode_and_of_prefill() -> None:
    report = Report(100, say=lambda line: None)
    reached = model_speed.run(machine.emulator(), Peaks(1e12, 1e14), report, ("llama-tiny",), spare=0)
    decodes, prefills = report.tables
    assert [row[:2] for row in decodes.rows] == [("llama-tiny", 1), ("llama-tiny", 2)]
    assert [row[:3] for row in prefills.rows] == [("llama-tiny", 1, 20), ("llama-tiny", 2, 20)]
    assert all(len(row) == len(table.columns) for table in report.tables for row in table.rows)
    assert reached == {"llama-tiny": {row[1]: row[2] for row in decodes.rows}}
    assert not report.failures


@pytest.mark.simt
@needs_emulator
def test_host_graph_and_sampling_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is made slower by a time of its own; only that time is in its figure."""
    replay, prepare = fakestream.Graph._replay, SimKernel.prepare

    def slow(seconds: float, work: Any) -> Any:
        def slower(*arguments: Any, **options: Any) -> Any:
            time.sleep(seconds)
            return work(*arguments, **options)

        return slower

    def slow_sampling(kernel: SimKernel, *arguments: Any) -> Any:
        launch = prepare(kernel, *arguments)
        return slow(0.5, launch) if kernel.name.startswith("sample<") else launch

    running = model_speed.build(machine.emulator(), "llama-tiny", 2, 20, 40)
    monkeypatch.setattr(model_speed, "build_batch", slow(0.1, build_batch))
    monkeypatch.setattr(fakestream.Graph, "_replay", slow(0.25, replay))
    monkeypatch.setattr(SimKernel, "prepare", slow_sampling)
    times = model_speed.decode_step(fakecupy, running, 2, 40)
    assert 0.1 <= times.host < 0.25 <= times.graph < 0.5 <= times.sampling < 0.75
    assert times.whole >= times.host + times.graph + times.sampling


def test_without_a_gpu_it_says_in_one_sentence_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Any:
        raise BackendError("No NVIDIA driver was found: install it")

    monkeypatch.setattr(machine, "gpu", missing)
    assert main.main([]) == 2
    assert capsys.readouterr().err == "gpu_check: No NVIDIA driver was found: install it\n"


def test_an_image_without_git_is_good_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert main.commit() == "unknown"


class TestReport:
    def test_sections_that_do_not_fit_are_skipped_and_said_so(self) -> None:
        report = Report(10, say=lambda line: None)
        with report.section("long", needs=60) as go:
            assert not go
        assert report.skipped == ["long: 60 s needed, 10 s left"]

    def test_an_exception_is_a_failure_and_no_end(self) -> None:
        report = Report(10, say=lambda line: None)
        with report.section("bad"):
            raise ValueError("no")
        assert "ValueError: no" in report.failures[0]

    def test_markdown_and_json(self, tmp_path: Path) -> None:
        report = Report(10, say=lambda line: None)
        report.facts["device"] = "a card"
        report.table("Speeds", "kernel", "GB/s").rows.append(("copy", 1234.5678))
        report.write(tmp_path)
        text = (tmp_path / "gpu_check.md").read_text()
        assert "- device: a card" in text
        assert "| copy | 1,235 |" in text
        assert json.loads((tmp_path / "gpu_check.json").read_text())["tables"][0]["rows"] == [["copy", 1234.5678]]


class TestPaper:
    def test_a_decode_step_moves_every_weight_once_and_the_cache_once(self) -> None:
        program = paper.PaperProgram("llama-8b")
        works = program.works(paper.Load([1] * 4, [1000] * 4))
        linear = sum(work.bytes for work in works if work.name == "skinny_gemm")
        assert program.spec.weight_bytes == pytest.approx(15.0e9, rel=0.01)
        assert linear == pytest.approx(program.spec.weight_bytes, rel=0.01)
        attention = sum(work.bytes for work in works if work.name == "decode_attention")
        assert attention == pytest.approx(4 * 1000 * 32 * 8 * 128 * 4, rel=0.1)

    def test_a_prompts_flops_are_two_a_weight_and_token_and_four_a_visible_pair(self) -> None:
        program = paper.PaperProgram("llama-1b")
        works = program.works(paper.Load([512], [512]))
        assert sum(w.flops for w in works if w.name == "cuBLAS") == 512 * program.spec.flops_per_token
        pairs = 512 * 513 // 2
        assert sum(w.flops for w in works if w.name == "prefill_attention") == 16 * 4 * 32 * 64 * pairs

    def test_a_window_bounds_what_attention_reads(self) -> None:
        program = paper.PaperProgram("gemma3-270m")
        near, far = (
            sum(w.bytes for w in program.works(paper.Load([1], [c])) if w.name == "decode_attention")
            for c in (1024, 8192)
        )
        assert far < 4 * near  # three layers of eighteen see everything

    @pytest.mark.parametrize(
        ("encoding", "tokens", "requests"), [("BF16", 1, 1), ("BF16", 64, 64), ("Q8_0", 64, 64), ("BF16", 2048, 1)]
    )
    def test_every_launch_is_counted(
        self, encoding: str, tokens: int, requests: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What the instructions launch, when they are called, is what `works` says."""
        launched: Counter[str] = Counter()
        monkeypatch.setattr(Kernel, "__call__", lambda self, *_, **__: launched.update([self.name.split("<")[0]]))
        program, longest = paper.PaperProgram("llama-8b", Encoding(encoding)), tokens // requests
        blas = SimpleNamespace(linear=lambda *_: launched.update(["cuBLAS"]))
        object.__setattr__(program.machine, "blas", blas)
        step = Step(Shape(tokens, requests, requests), longest, longest == 1, defaultdict(lambda: None))
        for instruction, _ in program.instructions:
            instruction(step)
        counted: Counter[str] = Counter()
        for work in program.works(paper.Load([longest] * requests, [8192] * requests)):
            counted[work.name] += work.kernels
        assert counted == launched


class TestPredictions:
    def test_a_tile_of_prefill_attention_on_an_a100(self) -> None:
        """128 rows, 32 keys, heads of 128: 2 * 2 MFLOP at 2048 a clock; 24 KiB a warp read and 16 written at 128 bytes
        a clock; 4096 exponentials at 16 a clock; 4.5 operations a score and one an output on 64 lanes."""
        tile = predict.Tile(predict.A100)
        assert (tile.tensor, tile.shared, tile.exponentials, tile.lanes) == (1024, 896, 256, 544)
        assert tile.share == pytest.approx(2 * 1024 / (1024 + 896 + 256 + 544))

    def test_a_copy_is_the_best_that_a_large_read_can_do(self) -> None:
        work = paper.Work("decode_attention", 10**9)
        assert predict.floor(work, predict.H100) == pytest.approx(10**9 / 3.35e12)
        assert predict.predicted(work, predict.H100) == pytest.approx(10**9 / 3.35e12 / 0.91 / 0.88 + 2e-6)


def test_the_peer_is_given_our_shapes() -> None:
    config = torch_peer.config_of("llama-8b")
    assert (config["hidden_size"], config["num_key_value_heads"], config["head_dim"]) == (4096, 8, 128)
    assert "model_type" not in config


class TestPeer:
    """What gpu_check makes of the process that runs PyTorch."""

    LINES = (
        b'{"batch": 1, "decode": 50.0, "prefill": 900.0, "versions": "torch 2"}\n'
        b'{"batch": 8, "decode": 200.0, "prefill": 1000.0, "versions": "torch 2"}\n'
    )
    ROWS = (("llama-1b", 1, 100.0, 50.0, 2.0, 900.0), ("llama-1b", 8, None, 200.0, None, 1000.0))

    @staticmethod
    def ask(monkeypatch: pytest.MonkeyPatch, run: Any) -> Report:
        monkeypatch.setattr(main, "PRESETS", ("llama-1b",))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
        monkeypatch.setattr(subprocess, "run", run)
        report = Report(100, say=lambda line: None)
        main.peers(report, {"llama-1b": {1: 100.0}})
        assert not report.failures
        return report

    def test_an_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        done = SimpleNamespace(returncode=0, stdout=b"Loading...\n" + self.LINES, stderr=b"a warning\n")
        report = self.ask(monkeypatch, lambda *_, **__: done)
        assert tuple(report.tables[0].rows) == self.ROWS
        assert report.facts["peer"] == "torch 2"
        assert not report.skipped

    def test_batches_before_a_failure_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        done = SimpleNamespace(returncode=1, stdout=self.LINES, stderr=b"Traceback\nOutOfMemoryError: 80 GB\n")
        report = self.ask(monkeypatch, lambda *_, **__: done)
        assert tuple(report.tables[0].rows) == self.ROWS
        assert report.skipped == ["PyTorch: llama-1b, batches 64, 256: it failed: OutOfMemoryError: 80 GB"]

    def test_batches_before_the_time_is_up_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a real process has printed when it is killed, as bytes."""
        run, code = subprocess.run, f"import time; print({self.LINES.decode()!r}, flush=True); time.sleep(60)"
        report = self.ask(monkeypatch, lambda *_, **kept: run([sys.executable, "-c", code], **(kept | {"timeout": 1})))
        assert tuple(report.tables[0].rows) == self.ROWS
        assert report.skipped == ["PyTorch: llama-1b, batches 64, 256: it took longer than 95 s"]

    def test_nothing_at_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        report = self.ask(monkeypatch, Mock(side_effect=subprocess.TimeoutExpired("python", 95)))
        assert report.skipped == ["PyTorch: llama-1b, batches 1, 8, 64, 256: it took longer than 95 s"]

    def test_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        report = Report(100, say=lambda line: None)
        main.peers(report, {})
        assert report.skipped == ["PyTorch + transformers: not installed"]


NO_GPU = availability()


@pytest.mark.cuda
@pytest.mark.skipif(NO_GPU is not None, reason=str(NO_GPU))
def test_the_gpu_of_this_machine_computes_what_numpy_does() -> None:
    report = Report(300, say=lambda line: None)
    correctness.run(machine.gpu(), report)
    assert report.failures == []
