"""A model's files as one object: what comes from which file, and whether two models are the same."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from minserve.backend.base import CheckpointError
from minserve.weights.checkpoint import load_checkpoint
from minserve.weights.files import parse_json, read_json
from minserve.weights.vocabulary import GgufVocabulary, TokenizerJson
from tests.weights.build import (
    FLOAT32,
    INT32,
    STRING,
    UINT32,
    Key,
    bounded_memory,
    entry,
    gguf_model,
    safetensors_bytes,
)
from tests.weights.tiny_gguf import EMBEDDING, keys


def folder(path: Path, **files: Any) -> Path:
    """A model's folder; a file's name is given with __ for the dot."""
    contents: dict[str, Any] = {
        "config__json": {"model_type": "llama", "eos_token_id": 2},
        "tokenizer__json": {"model": {}},
        "model__safetensors": safetensors_bytes({"w": entry("F32", [1], 0, 4)}, b"1234"),
    } | files
    path.mkdir(exist_ok=True)
    for name, content in contents.items():
        if content is not None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            (path / name.replace("__", ".")).write_bytes(data)
    return path


def gguf_file(path: Path, *more: Key) -> Path:
    path.write_bytes(gguf_model(keys("llama", *more), EMBEDDING))
    return path


def test_a_folder_gives_weights_config_tokenizer_template_and_defaults(tmp_path: Path) -> None:
    path = folder(
        tmp_path / "m",
        tokenizer_config__json={
            "bos_token": {"content": "<s>", "lstrip": False},
            "eos_token": "</s>",
            "unk_token": None,
            "add_bos_token": True,
            "chat_template": "template",
        },
        generation_config__json={
            "temperature": 0.6,
            "top_p": 0.9,
            "top_k": 20,
            "repetition_penalty": 1.1,
            "eos_token_id": [2, 7],
        },
    )
    model = load_checkpoint(path)
    assert model.file_format == "safetensors"
    assert model.source == path
    assert model.checkpoint.config["model_type"] == "llama"
    assert list(model.checkpoint.names()) == ["w"]
    assert isinstance(model.tokenizer, TokenizerJson)
    assert json.loads(model.tokenizer.data) == {"model": {}}
    assert (model.tokenizer.bos_token, model.tokenizer.eos_token) == ("<s>", "</s>")
    assert model.tokenizer.add_bos is True
    assert model.tokenizer.end_ids == {2, 7}
    assert model.chat_template == "template"
    d = model.defaults
    assert (d.temperature, d.top_p, d.top_k, d.min_p, d.repetition_penalty) == (0.6, 0.9, 20, None, 1.1)


def test_a_gguf_file_gives_the_same(tmp_path: Path) -> None:
    path = gguf_file(
        tmp_path / "m.gguf",
        ("tokenizer.chat_template", STRING, "template"),
        ("general.sampling.temp", FLOAT32, 0.5),
        ("general.sampling.top_k", INT32, 20),
    )
    (tmp_path / "config.json").write_text("{}")  # as repositories of GGUF files often have
    for source in (path, tmp_path):
        model = load_checkpoint(source)
        assert (model.file_format, model.source, model.chat_template) == ("gguf", path, "template")
        assert isinstance(model.tokenizer, GgufVocabulary)
        assert (model.defaults.temperature, model.defaults.top_k, model.defaults.top_p) == (0.5, 20, None)
        assert model.checkpoint.tensor("model.embed_tokens.weight").shape == (4, 32)


def test_a_template_file_comes_before_the_tokenizers(tmp_path: Path) -> None:
    named = {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}
    path = folder(tmp_path / "m", tokenizer_config__json=named)
    assert load_checkpoint(path).chat_template == "d"
    (path / "chat_template.jinja").write_text("ž", encoding="utf-8")
    assert load_checkpoint(path).chat_template == "ž"
    (path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is not UTF-8"):
        load_checkpoint(path)
    assert load_checkpoint(folder(tmp_path / "n")).chat_template is None


def test_the_configs_end_token_counts_where_generation_config_names_none(tmp_path: Path) -> None:
    tokenizer = load_checkpoint(folder(tmp_path / "m")).tokenizer
    assert isinstance(tokenizer, TokenizerJson)
    assert tokenizer.end_ids == {2}


# bug: 24
def test_weights_that_changed_under_the_same_name_have_another_id(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    first = load_checkpoint(path).weights_id
    assert load_checkpoint(path).weights_id == first
    weights = path / "model.safetensors"
    stat = weights.stat()
    weights.write_bytes(safetensors_bytes({"w": entry("F32", [1], 0, 4)}, b"4321"))
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))
    second = load_checkpoint(path).weights_id
    weights.write_bytes(safetensors_bytes({"v": entry("F32", [1], 0, 4)}, b"4321"))
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # only the header differs
    third = load_checkpoint(path).weights_id
    gguf = load_checkpoint(gguf_file(tmp_path / "m.gguf")).weights_id
    assert len({first, second, third, gguf, load_checkpoint(Path("dummy")).weights_id}) == 5


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config__json": None}, r"no config\.json"),
        ({"config__json": []}, "not a JSON object"),
        ({"config__json": b"{"}, r"config\.json: not valid JSON"),
        ({"config__json": b'{"a": 1, "a": 2}'}, "'a' appears twice"),
        ({"config__json": b"[" * 100000}, "not valid JSON"),
        ({"config__json": b'{"a": ' + b"9" * 5000 + b"}"}, "not valid JSON"),
        ({"config__json": {"quantization_config": {"quant_method": "awq"}}}, "quantized by awq"),
        ({"config__json": {"quantization_config": 3}}, "quantized by some method"),
        ({"model__safetensors": None}, r"neither model\.safetensors nor"),
        ({"model__safetensors": None, "pytorch_model__bin": b""}, "only pickled weights"),
        ({"tokenizer__json": None}, r"no tokenizer\.json"),
        ({"generation_config__json": {"top_p": 2}}, "top_p must be a number from 0 to 1"),
        ({"generation_config__json": {"temperature": "hot"}}, "temperature must be a number"),
        ({"generation_config__json": {"top_k": True}}, "top_k must be a number"),
        ({"generation_config__json": {"eos_token_id": ["</s>"]}}, "eos_token_id must be"),
        ({"config__json": {"eos_token_id": -1}}, "eos_token_id must be"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder(tmp_path / "m", **files))


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint(tmp_path / "none.gguf")
    (tmp_path / "model.bin").write_bytes(b"1")
    with pytest.raises(CheckpointError, match=r"neither a folder nor a \.gguf file"):
        load_checkpoint(tmp_path / "model.bin")
    gguf_file(tmp_path / "a.gguf")
    gguf_file(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"2 \.gguf files"):
        load_checkpoint(tmp_path)


def test_a_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"m\.gguf: a part of a split file"):
        load_checkpoint(gguf_file(tmp_path / "m.gguf", ("split.count", UINT32, 3)))


def test_json_files_are_bounded_and_may_start_with_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(CheckpointError, match="more than the"):
        read_json(path)
    with pytest.raises(CheckpointError, match="can't be read"):
        read_json(tmp_path / "none.json")
    assert parse_json(b'\xef\xbb\xbf{"a": 1}', "x") == {"a": 1}


def test_weights_are_not_read_when_a_model_is_opened(tmp_path: Path) -> None:
    size = 64 << 20
    path = folder(tmp_path / "m", model__safetensors=safetensors_bytes({"w": entry("F32", [size // 4], 0, size)}))
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.truncate(file.tell() + size)
    with bounded_memory(1 << 20):
        assert load_checkpoint(path).checkpoint.tensor("w").data.nbytes == size
