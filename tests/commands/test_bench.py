"""minserve bench: what its options refuse, and what it says of a server that doesn't answer."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.commands.conftest import Invoke


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--base-url", "nowhere"),
        ("--base-url", "http://127.0.0.1:port"),
        ("--endpoint", "v1/completions"),
        ("--num-prompts", "0"),
        ("--random-input-len", "-1"),
        ("--random-output-len", "0"),
        ("--random-prefix-len", "-1"),
        ("--request-rate", "0"),
        ("--request-rate", "nan"),
        ("--burstiness", "0"),
        ("--burstiness", "inf"),
        ("--max-concurrency", "0"),
        ("--num-warmups", "-1"),
        ("--temperature", "nan"),
        ("--metric-percentiles", "half"),
        ("--metric-percentiles", "50,101"),
        ("--metric-percentiles", "nan"),
        ("--goodput", "speed:1"),
        ("--goodput", "ttft"),
        ("--goodput", "ttft:-1"),
        ("--goodput", "ttft:nan"),
        ("--extra-body", "{"),
        ("--extra-body", "[]"),
        ("--tokenizer", "none.gguf"),
        ("--tokenizer", "notes.txt"),
        ("--save-result", "none/result.json"),
    ],
)
def test_a_wrong_value_is_one_sentence_that_names_the_option(
    invoke: Invoke, tmp_path: Path, option: str, value: str
) -> None:
    (tmp_path / "notes.txt").write_text("no model", encoding="utf-8")
    result = invoke("bench", "--base-url", "http://127.0.0.1:1", option, value)
    assert (result.exit_code, result.stdout) == (2, "")
    assert option in result.stderr.splitlines()[-1]


def test_a_server_that_does_not_answer_gets_only_what_is_known(invoke: Invoke, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        result = invoke("bench", "--base-url", url, "--num-prompts", "2", "--save-result", "result.json")
    assert (result.exit_code, result.stderr) == (1, "")
    assert result.stdout.startswith("requests: 2\ncompleted: 0\n")
    assert "None" not in result.stdout
    assert (tmp_path / "result.json").exists()
