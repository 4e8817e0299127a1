"""minserve generate, chat, pull and config: what they refuse, and in which words."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from minserve.cli import main
from tests.commands.conftest import Invoke

ROOT = Path(__file__).parents[2]
TINY = ("--model", "dummy:llama-tiny", "--backend", "numpy", "--num-blocks", "16")


def run(folder: Path, *arguments: str | bytes, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """The command as a process of its own: bytes that are no text reach it only so. Modules of `folder` come first."""
    path = os.pathsep.join((str(folder), str(ROOT)))
    environment = {**os.environ, "MINSERVE_DATA": str(folder), "PYTHONPATH": path, "PYTHONUTF8": "1"}
    command = [sys.executable, "-m", "minserve", *arguments]
    return subprocess.run(command, input=given, cwd=folder, env=environment, capture_output=True, timeout=60)


@pytest.mark.skipif(sys.platform == "win32", reason="arguments are no bytes there")
def test_a_prompt_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    for result in (
        run(tmp_path, "generate", b"caf\xe9", *TINY),
        run(tmp_path, "generate", "-", *TINY, given=b"caf\xe9"),
        run(tmp_path, "generate", "Hi", "--system", b"\xff", *TINY),
    ):
        assert (result.returncode, result.stdout) == (1, b"")
        assert b"is not valid UTF-8" in result.stderr
        assert b"Traceback" not in result.stderr


def test_a_chat_outlives_a_line_that_is_no_utf8(tmp_path: Path) -> None:
    result = run(tmp_path, "chat", *TINY, "--max-new", "2", given=b"caf\xe9\nHi\n")
    assert result.returncode == 0
    assert result.stderr.index(b"is not valid UTF-8") < result.stderr.index(b"tokens, ")


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals there")
def test_lines_of_a_chat_can_be_edited_and_ctrl_c_drops_only_one(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "minserve", "chat", *TINY, "--max-new", "2"]
    environment = {**os.environ, "MINSERVE_DATA": str(tmp_path), "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    chat = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell ignores it for what runs behind `&`
    )
    os.close(theirs)
    try:
        _read_until(ours, b"> ")
        os.write(ours, b"dropped")
        _read_until(ours, b"dropped")
        _interrupt_until(chat, ours, b"> ")
        os.write(ours, b"/nw\x1b[De\nHi\n")  # left, e: /new
        shown = _read_until(ours, b"in all.*> ")
        assert shown.count(b"tokens, ") == 1
        os.write(ours, b"\x04")
        assert chat.wait(20) == 0
    finally:
        chat.kill()
        chat.wait()
        os.close(ours)


def _interrupt_until(chat: subprocess.Popen[bytes], terminal: int, mark: bytes) -> None:
    """Readline is deaf to signals for a moment after each key, on a busy machine a longer one: so press again."""
    for _ in range(60):
        time.sleep(0.5)
        chat.send_signal(signal.SIGINT)
        if select.select([terminal], [], [], 0.5)[0]:
            break
    _read_until(terminal, mark)


def _read_until(terminal: int, mark: bytes) -> bytes:
    """mark: a regular expression."""
    shown = b""
    while not re.search(mark, shown, re.DOTALL):
        ready, _, _ = select.select([terminal], [], [], 30)
        assert ready, shown
        shown += os.read(terminal, 65536)
    return shown


def test_a_chat_outlives_messages_that_the_template_refuses(tmp_path: Path) -> None:
    (tmp_path / "strict.jinja").write_text("{{ raise_exception('no') }}", encoding="utf-8")
    result = run(tmp_path, "chat", *TINY, "--chat-template", "strict.jinja", given=b"Hi\nHo\n")
    assert (result.returncode, result.stderr.count(b"refuses these messages")) == (0, 2)
    result = run(tmp_path, "generate", "Hi", *TINY, "--chat-template", "strict.jinja")
    assert (result.returncode, b"Traceback" in result.stderr) == (1, False)


def test_an_answer_and_its_numbers_are_lines_of_their_own_in_one_pipe(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "minserve", "generate", "Hi", *TINY, "--max-new", "2"]
    environment = {**os.environ, "MINSERVE_DATA": str(tmp_path), "PYTHONPATH": str(ROOT)}
    both = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=True
    )
    assert both.stdout.splitlines()[-1].startswith(b"2 tokens, ")


def test_a_single_token_has_no_rate(tmp_path: Path) -> None:
    result = run(tmp_path, "generate", "Hi", *TINY, "--max-new", "1")
    assert b"1 tokens, first after " in result.stderr


def test_generate_says_when_it_has_to_settle_for_the_slow_backend(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('needs another NumPy')", encoding="utf-8")
    result = run(tmp_path, "generate", "Hi", *TINY[:2], "--device", "cpu", *TINY[4:], "--max-new", "2")
    assert result.returncode == 0
    assert b"Numba can't be imported, so the NumPy backend runs, several times slower: needs another" in result.stderr


@pytest.mark.parametrize("command", [("generate", "Hi"), ("chat",), ("pull",)])
def test_a_servers_limits_are_no_flags_of_a_terminal(invoke: Invoke, command: tuple[str, ...]) -> None:
    result = invoke(*command, "--max-tokens", "5")
    assert result.exit_code == 2
    assert "No such option" in result.output


@pytest.mark.parametrize(
    "option", ["--max-new=0", "--max-new=-1", "--temperature=nan", "--temperature=inf", f"--seed={2**63}"]
)
@pytest.mark.parametrize("command", [("generate", "Hi"), ("chat",)])
def test_numbers_out_of_range_are_refused_by_name(invoke: Invoke, command: tuple[str, ...], option: str) -> None:
    result = invoke(*command, option)
    assert result.exit_code == 2
    assert option.partition("=")[0] in result.stderr


def test_a_cache_that_can_not_be_made_is_one_sentence(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path / "file"))
    result = invoke("pull")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "MINSERVE_CACHE" in result.stderr


def test_only_servers_have_server_flags() -> None:
    for name, command in main.commands.items():
        if name in ("serve", "generate", "chat", "pull"):
            flags = {flag for each in command.params if isinstance(each, click.Option) for flag in each.opts}
            assert ("--port" in flags) is (name == "serve")
            assert "--max-model-len" in flags


def test_config_says_what_a_server_would_refuse(invoke: Invoke, tmp_path: Path) -> None:
    assert invoke("config").exit_code == 0
    (tmp_path / "minserve.toml").write_text('[keys.web]\nsha256 = "ab"\nuser = "ann"\n', encoding="utf-8")
    result = invoke("config", "--threads", "100000", "--set", "local.allow_shrink=true")
    assert result.exit_code == 2
    assert "engine.threads " in result.stdout  # printed all the same
    for problem in ("keys.web.sha256 must be", "engine.threads (100000) is more", "local.allow_shrink does nothing"):
        assert problem in result.stderr


def test_a_configuration_that_is_a_folder_is_said(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "minserve.toml").mkdir()
    result = invoke("config")
    assert (result.exit_code, "minserve.toml is a folder" in result.stderr) == (2, True)
