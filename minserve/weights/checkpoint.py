"""A model's files as one object: weights, tokenizer, chat template, defaults, identity.

Owns what is in which file of a Hugging Face folder or a GGUF file. It must not know how weights are computed with, how
text is tokenized, or where the files came from (`hub`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minserve.backend.base import CheckpointError
from minserve.weights.dummy import is_dummy, load_dummy
from minserve.weights.files import identity, read_bytes, read_json
from minserve.weights.gguf_file import read_gguf
from minserve.weights.gguf_metadata import Metadata, vocabulary
from minserve.weights.gguf_model import GgufCheckpoint
from minserve.weights.loaded import GenerationDefaults, LoadedModel
from minserve.weights.safetensors_file import SafetensorsCheckpoint
from minserve.weights.vocabulary import TokenizerJson

_LARGE = 1e9  # no sampling parameter means anything beyond


def load_checkpoint(path: Path) -> LoadedModel:
    """Open a folder (Hugging Face's layout, or one that holds a single .gguf file), a .gguf file, or a `dummy` name.

    Weights are mapped, not read: this takes milliseconds. CheckpointError says what is missing or wrong.
    """
    if is_dummy(str(path)):
        return load_dummy(str(path))
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if not files or list(path.glob("*.safetensors")):
            return _load_folder(path)
        if len(files) > 1:
            raise CheckpointError(f"{path} holds {len(files)} .gguf files: name the one to load")
        path = files[0]
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    if path.suffix.lower() != ".gguf":
        raise CheckpointError(f"{path.name} is neither a folder nor a .gguf file")
    return _load_gguf(path)


def _load_gguf(path: Path) -> LoadedModel:
    file = read_gguf(path)
    metadata = Metadata(file.metadata)
    try:
        if metadata.integer("split.count", 1, low=0) > 1:
            raise CheckpointError("a part of a split file; join the parts first (llama-gguf-split --merge)")
        checkpoint = GgufCheckpoint(file)
        words = vocabulary(metadata)
        template = metadata.text("tokenizer.chat_template", "") or None
        defaults = _gguf_defaults(metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{path.name}: {error}") from error
    weights_id = identity([path], [file.header])
    return LoadedModel(checkpoint, words, template, defaults, weights_id, path, "gguf")


def _gguf_defaults(metadata: Metadata) -> GenerationDefaults:
    def number(key: str, high: float = _LARGE) -> float | None:
        key = f"general.sampling.{key}"
        return metadata.number(key, high=high) if key in metadata else None

    top_k = number("top_k")
    return GenerationDefaults(
        temperature=number("temp"),
        top_p=number("top_p", 1),
        top_k=None if top_k is None else int(top_k),
        min_p=number("min_p", 1),
        repetition_penalty=number("penalty_repeat"),
    )


def _load_folder(folder: Path) -> LoadedModel:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json")
    config = read_json(folder / "config.json")
    if "quantization_config" in config:
        method = config["quantization_config"]
        method = method.get("quant_method", "some method") if isinstance(method, dict) else "some method"
        raise CheckpointError(
            f"the weights are quantized by {method}, which can't be read; take the original or a GGUF"
        )
    if not list(folder.glob("*.safetensors")) and list(folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder} has only pickled weights (.bin), which could run code; take safetensors or GGUF"
        )
    checkpoint = SafetensorsCheckpoint(folder, config)
    settings = _json_if_there(folder / "tokenizer_config.json")
    generation = _json_if_there(folder / "generation_config.json")
    weights_id = identity([file.path for file in checkpoint.files], [file.header for file in checkpoint.files])
    return LoadedModel(
        checkpoint,
        _tokenizer(folder, settings, _end_ids(generation, config)),
        _chat_template(folder, settings),
        _defaults(generation),
        weights_id,
        folder,
        "safetensors",
    )


def _json_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _tokenizer(folder: Path, settings: Mapping[str, Any], end_ids: frozenset[int]) -> TokenizerJson:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json")

    def text(key: str) -> str | None:
        value = settings.get(key)
        if isinstance(value, dict):  # an AddedToken
            value = value.get("content")
        return value if isinstance(value, str) else None

    add_bos = settings.get("add_bos_token")
    return TokenizerJson(
        read_bytes(path),
        bos_token=text("bos_token"),
        eos_token=text("eos_token"),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        end_ids=end_ids,
    )


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, or what tokenizer_config.json holds: one template, or a list of named ones."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return read_bytes(path).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path.name} is not UTF-8") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _defaults(generation: Mapping[str, Any]) -> GenerationDefaults:
    def number(key: str, low: float, high: float = _LARGE) -> float | None:
        value = generation.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise CheckpointError(
                f"generation_config.json: {key} must be a number from {low} to {high}, not {value!r:.40}"
            )
        return float(value)

    top_k = number("top_k", 0)
    return GenerationDefaults(
        temperature=number("temperature", 0),
        top_p=number("top_p", 0, 1),
        top_k=None if top_k is None else int(top_k),
        min_p=number("min_p", 0, 1),
        repetition_penalty=number("repetition_penalty", 0),
    )


def _end_ids(generation: Mapping[str, Any], config: Mapping[str, Any]) -> frozenset[int]:
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(end) is int and end >= 0 for end in ends):
        raise CheckpointError(f"eos_token_id must be a token id or a list of them, not {ends!r:.80}")
    return frozenset(ends)
