"""minserve batch: what its options refuse; what it does is `tests/server/test_batch_file.py`'s."""

from __future__ import annotations

from pathlib import Path

from tests.commands.conftest import Invoke


def test_a_server_has_its_model_already(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").touch()
    result = invoke("batch", "in.jsonl", "out.jsonl", "--url", "http://127.0.0.1:1", "--model", "dummy")
    assert (result.exit_code, "--url and --model" in result.stderr) == (2, True)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_run_without_a_terminal_is_only_its_lines(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").touch()
    said = invoke("batch", "in.jsonl", "out.jsonl").stderr
    assert said == "0 lines, 0 of them done before\nAll lines have a result, 0 of them an error.\n"


def test_a_server_is_an_address(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").touch()
    result = invoke("batch", "in.jsonl", "out.jsonl", "--url", "nowhere")
    assert (result.exit_code, "--url" in result.stderr) == (2, True)
