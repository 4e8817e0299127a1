"""minserve models, cache and completion."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from minserve.cli import main
from minserve.weights import hub
from tests.commands.conftest import Invoke

NAME = "smollm2-135m-instruct"
MODEL = replace(hub.WHEEL_MODELS[NAME], member_bytes=2_500_000)


@pytest.fixture(autouse=True)
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder in which the known model lies already."""
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setitem(hub.WHEEL_MODELS, NAME, MODEL)
    file = tmp_path / "cache" / "models" / MODEL.filename
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(MODEL.member_bytes))
    return file


def test_models_says_licence_size_and_what_is_cached(invoke: Invoke, cached: Path) -> None:
    def row() -> list[str]:
        return next(line.split() for line in invoke("models").stdout.splitlines() if line.startswith(NAME))

    assert row()[1:6] == ["Apache-2.0", "93", "MB", "2", "MB"]
    cached.unlink()
    assert row()[1:5] == ["Apache-2.0", "93", "MB", "-"]
    assert invoke("models").stdout.splitlines()[0].split()[2:5] == ["download", "on", "disk"]
    assert "dummy:gemma3-tiny" in invoke("models").stdout


def test_the_cache_is_listed_and_cleared(invoke: Invoke, cached: Path) -> None:
    listing = invoke("cache", "list").stdout
    assert str(cached) in listing
    assert "2.5 MB" in listing
    assert "sizes on disk" in listing
    for arguments in ((), (NAME, "--all"), ("nothing-of-that-name",)):
        result = invoke("cache", "clear", *arguments)
        assert result.exit_code == 2, arguments
        assert cached.exists()
    assert "'nothing-of-that-name' is not in the cache" in result.stderr
    assert invoke("cache", "clear", NAME).stdout == "2.5 MB freed\n"
    assert not cached.exists()
    assert NAME not in invoke("cache", "list").stdout


def test_all_is_cleared_at_once(invoke: Invoke, cached: Path) -> None:
    assert invoke("cache", "clear", "--all").stdout == "2.5 MB freed\n"
    assert not cached.exists()
    assert invoke("cache", "clear", "--all").stdout == "0.0 MB freed\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(invoke: Invoke, shell: str) -> None:
    script = invoke("completion", shell).stdout
    assert "_MINSERVE_COMPLETE" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("words", "expected"), [("minserve ca", "cache"), ("minserve serve --max-num-s", "--max-num-seqs")]
)
def test_completion_knows_commands_and_flags(words: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert expected in BashComplete(main, {}, "minserve", "_MINSERVE_COMPLETE").complete()
