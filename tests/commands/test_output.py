"""Standard streams and files that can't be written or read: one line says why, whatever the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FULL = Path("/dev/full")
TINY = ("--model", "dummy:llama-tiny", "--backend", "numpy", "--num-blocks", "16", "--max-new", "2")

needs_full = pytest.mark.skipif(not FULL.exists(), reason="no device here is always full")


def run(folder: Path, command: tuple[str, ...], shell: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own; shell: its redirections."""
    environment = {**os.environ, "MINSERVE_DATA": str(folder), "PYTHONPATH": str(ROOT), **variables}
    line = ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-m", "minserve", *command]
    return subprocess.run(line, cwd=folder, env=environment, input="", capture_output=True, text=True, timeout=60)


@needs_full
@pytest.mark.parametrize(
    "command", [("--help",), ("serve", "--help"), ("config",), ("models",), ("keys", "new"), ("generate", "Hi", *TINY)]
)
def test_output_onto_a_full_disk_is_one_line(tmp_path: Path, command: tuple[str, ...]) -> None:
    result = run(tmp_path, command, ">/dev/full")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("minserve: ")
    assert result.stderr.endswith("No space left on device\n")
    assert "Traceback" not in result.stderr


@needs_full
def test_an_error_that_can_not_be_said_is_an_exit_status_all_the_same(tmp_path: Path) -> None:
    assert run(tmp_path, ("generate", "Hi", *TINY), "2>/dev/full").returncode == 1


@needs_full
@pytest.mark.parametrize(
    "command",
    [
        ("bench", "--base-url", "http://127.0.0.1:1", "--num-prompts", "1", "--save-result", "full.svg"),
        ("cost", "plan.toml", "--plot", "full.svg"),
    ],
)
def test_a_file_that_can_not_be_written_comes_after_what_it_was_to_hold(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "full.svg").symlink_to(FULL)
    (tmp_path / "plan.toml").write_text("[prices]\nprefill = 1.0\n[users]\ncount = 5\n", encoding="utf-8")
    result = run(tmp_path, command)
    assert result.stdout
    assert (result.returncode, result.stderr) == (1, "minserve: full.svg can't be written: No space left on device\n")


@pytest.mark.skipif(sys.platform == "win32", reason="no shell there closes them")
@pytest.mark.parametrize(
    ("command", "closed"),
    [
        (("config",), ">&-"),
        (("generate", "Hi", *TINY), ">&-"),
        (("generate", "-", *TINY), "<&-"),
        (("chat", *TINY), "<&-"),
        (("chat", *TINY), "<&- >&- 2>&-"),
    ],
)
def test_a_closed_stream_is_an_empty_one(tmp_path: Path, command: tuple[str, ...], closed: str) -> None:
    result = run(tmp_path, command, closed)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


def test_text_that_the_output_can_not_encode_is_escaped(tmp_path: Path) -> None:
    settings = ("--set", "degradation.message=\u4f60")
    result = run(tmp_path, ("config", *settings), PYTHONIOENCODING="latin-1", PYTHONUTF8="1")
    assert result.returncode == 0, result.stderr
    assert "'\\u4f60'" in result.stdout
