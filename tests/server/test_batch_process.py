"""A batch as a process: what it says before and after the work, and a signal in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minserve.config import Config
from minserve.server.batch_file import Batch, Status, run
from minserve.server.batch_lines import Line
from minserve.server.batch_results import Results, answered, faulty
from tests.server.batches import line, results_of, write
from tests.server.serving import COMPLETION


def test_results_that_can_not_be_written_are_said_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", line("a"))
    lines: list[str] = []
    batch = Batch(source, tmp_path / "none" / "out.jsonl")
    assert run(Config(), batch, progress=lambda *_: None, say=lines.append) == Status.UNUSABLE
    assert "out.jsonl can't be written" in capsys.readouterr().err
    assert lines == ["1 lines, 0 of them done before"]


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes in folders there")
@pytest.mark.parametrize("name", ["in.jsonl", "out.jsonl"])
def test_pipes_are_refused_since_they_are_read_only_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    batch = Batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert run(Config(), batch, progress=lambda *_: None, say=lambda _: None) == Status.UNUSABLE
    assert f"{name} is no regular file" in capsys.readouterr().err


async def test_a_run_that_is_complete_says_how_many_lines_have_an_error(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("a"), line("b"), "no JSON")
    results = Results(tmp_path / "out.jsonl")
    results.add(Line(1, "a"), answered(Line(1, "a"), "cmpl-1", 200, {}), failed=False)
    results.add(Line(2, "b"), answered(Line(2, "b"), "cmpl-2", 400, {}), failed=True)
    results.add(Line(3, None), faulty(Line(3, None, fault="no JSON")), failed=True)
    await results.close()
    lines: list[str] = []
    batch = Batch(source, tmp_path / "out.jsonl")
    status = await asyncio.to_thread(run, Config(), batch, progress=lambda *_: None, say=lines.append)
    assert (status, lines[-1]) == (Status.FAILED, "All lines have a result, 2 of them an error.")


def minserve_batch(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "minserve", "batch", "in.jsonl", "out.jsonl", "--model", "dummy"]
    command += ["--backend", "numpy", "--num-blocks", "64", "--max-num-seqs", "4", *more]
    root = Path(__file__).parent.parent.parent
    environment = os.environ | {"MINSERVE_DATA": str(folder / "data"), "PYTHONPATH": str(root)}
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE)


async def test_a_file_that_another_process_writes_is_refused_at_once(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    results = Results(tmp_path / "out.jsonl")
    with minserve_batch(tmp_path) as process:
        _, errors = await asyncio.to_thread(process.communicate, timeout=40)
    assert (process.returncode, errors.decode().splitlines()) == (
        Status.UNUSABLE,
        [
            "1 lines, 0 of them done before",
            "minserve: out.jsonl is being written by another run of minserve batch",
        ],
    )
    await results.close()


def test_a_run_goes_on_though_nobody_reads_what_it_says(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a", COMPLETION | {"model": "dummy"}))
    process = minserve_batch(tmp_path)
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(60) == Status.COMPLETE
    assert len(results_of(tmp_path / "out.jsonl")) == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_a_run_that_is_terminated_goes_on_where_it_stopped(tmp_path: Path) -> None:
    body = COMPLETION | {"model": "dummy", "max_tokens": 50, "ignore_eos": True}
    source = write(tmp_path / "in.jsonl", *(line(f"r{i}", body) for i in range(120)))
    target = tmp_path / "out.jsonl"
    first = minserve_batch(tmp_path)
    try:
        until = time.monotonic() + 60
        while not (target.exists() and target.stat().st_size) and time.monotonic() < until and first.poll() is None:
            time.sleep(0.02)
        first.send_signal(signal.SIGTERM)
        _, errors = first.communicate(timeout=40)
    finally:
        first.kill()
    assert first.returncode == 3, errors
    before = results_of(target)
    assert 0 < len(before) < 120
    with target.open("ab") as file:
        file.write(b'{"id":"batch_req_12')  # what a kill -9 may leave
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in (source, target):
        path.rename(elsewhere / path.name)
    second = minserve_batch(elsewhere)
    _, errors = second.communicate(timeout=100)
    assert second.returncode == 0, errors
    after = results_of(elsewhere / "out.jsonl")
    assert after[: len(before)] == before
    assert sorted(each["custom_id"] for each in after) == sorted(f"r{i}" for i in range(120))
    assert {each["response"]["body"]["usage"]["completion_tokens"] for each in after} == {50}
