"""From a configuration to an engine: the chat template that is asked for, and what is said of the cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from minserve.assemble import Assembly, assemble
from minserve.backend.base import CheckpointError
from minserve.config import Config, EngineConfig, ModelConfig
from minserve.weights.dummy import load_dummy
from tests.engines import tiny


def with_template(path: Path) -> Assembly:
    engine = EngineConfig(backend="numpy", num_blocks=16)
    return assemble(Config(model=ModelConfig(name="dummy", chat_template=str(path)), engine=engine))


def test_a_template_of_ones_own_replaces_the_models(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}", encoding="utf-8")
    assert with_template(path).template.render([{"role": "user", "content": "Hi"}]) == "[user] Hi\n"


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"{% for m in %}"])
def test_a_template_that_is_none_is_said_before_weights_are_loaded(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bad.jinja"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr("minserve.assemble.load_model", None)
    with pytest.raises(CheckpointError, match="template"):
        with_template(path)


def test_a_model_without_a_template_is_said_to_get_chatml(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = replace(load_dummy("dummy"), chat_template=None)
    monkeypatch.setattr("minserve.assemble.load_checkpoint", lambda _: bare)
    assert [note for note in tiny().notes if "ChatML" in note]
    monkeypatch.undo()
    assert not [note for note in tiny().notes if "ChatML" in note]


@pytest.mark.parametrize(
    ("seats", "length", "said"),
    [
        (2, 64, "64 blocks of 8 tokens: 2 requests of 64 tokens at once"),
        (6, 256, "64 blocks of 8 tokens: 2 requests of 256 tokens at once, or 6 of 85"),
    ],
)
def test_the_capacity_is_said_once_where_every_seat_has_its_full_length(seats: int, length: int, said: str) -> None:
    engine = EngineConfig(backend="numpy", num_blocks=64, block_size=8, max_num_seqs=seats, max_model_len=length)
    assert assemble(Config(model=ModelConfig(name="dummy:llama-tiny"), engine=engine)).capacity() == said
