"""The experiments in scripts/, in short: they start, measure, judge, and the server stands them."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def experiment(name: str, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """(exit status, the printed result, standard error)"""
    command = [sys.executable, str(ROOT / "scripts" / name), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def names_from_minserve(source: str) -> list[tuple[str, str]]:
    """(module, name) of each name that a script imports from here."""
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if (node.module or "").partition(".")[0] == "minserve"]
    return [(node.module or "", alias.name) for node in ours for alias in node.names]


def scripts() -> list[Path]:
    """Those in Python, which a type checker can't find: most have no ending."""
    files = [path for path in (ROOT / "scripts").rglob("*") if path.is_file() and path.suffix in ("", ".py")]
    return [path for path in files if "python" in path.read_text(encoding="utf-8").partition("\n")[0] or path.suffix]


@pytest.mark.parametrize("script", [pytest.param(path, id=path.name) for path in scripts()])
def test_what_a_script_imports_exists(script: Path) -> None:
    for module, name in names_from_minserve(script.read_text(encoding="utf-8")):
        assert hasattr(importlib.import_module(module), name) or find_spec(f"{module}.{name}"), f"{module}: {name}"


@pytest.mark.slow
def test_a_crash_while_32_calls_run_loses_nothing_that_was_settled() -> None:  # bug: 66
    code, result, errors = experiment("crash_ledger", "--rounds", "1", "--streams", "32")
    assert (code, errors) == (0, "")
    assert result["interrupted"] >= 32
    assert result["finished"] >= 1


@pytest.mark.slow
def test_far_too_many_calls_are_all_answered() -> None:
    """Wide bounds: the machine that runs tests does other things too, now more, now less. Few but long answers: the
    client of hundreds of short ones a second takes the processor from the server that it measures."""
    short = ("--times", "5", "--seconds", "5", "--calm", "2", "--warmup", "0.5", "--tokens", "200", "--refusals", "30")
    code, result, errors = experiment("overload", "--backend", "numpy", *short, "--slower", "5", "--right", "0.3")
    assert (code, errors) == (0, "")
    assert result["unanswered"] == 0
    assert result["refused"] >= 30
    assert result["admitted"] >= 20


def test_the_truth_of_a_refusal_is_when_the_next_call_that_got_in_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    overload: Any = types.ModuleType("overload")
    monkeypatch.setitem(sys.modules, "overload", overload)
    exec(compile((ROOT / "scripts" / "overload").read_text(encoding="utf-8"), "overload", "exec"), overload.__dict__)
    Seen = overload.Seen
    seen = [
        Seen(0.0, 200, queue=0.0, run=1.0),
        Seen(1.0, 503, retry=4.0),  # the next one in begins at 6: right
        Seen(2.0, 503, retry=9.0),  # at 6: more than twice too long
        Seen(3.0, 200, queue=3.0, run=1.0),
        Seen(4.0, 503, retry=2.0),  # nobody came in afterwards: says nothing
    ]
    assert overload.truths(seen) == [(9.0, 4.0), (4.0, 5.0)]
    args = types.SimpleNamespace(slower=1.5, refusals=2, right=0.9)
    faults: list[str] = []
    result = overload.judge(args, [Seen(0.0, 200, run=1.0)], seen, 10.0, faults)
    assert (result["refused"], result["retry_after_right"]) == (2, 0.5)
    assert [fault.split(";")[0] for fault in faults] == [
        "only 50% of the refusals said when to come back within a factor of two"
    ]
