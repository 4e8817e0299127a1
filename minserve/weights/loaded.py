"""What loading a model's files gives: plain data, whatever the format.

Owns nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from minserve.backend.base import Checkpoint
from minserve.weights.vocabulary import GgufVocabulary, TokenizerJson


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's authors recommend where a request says nothing (generation_config.json). None: nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """weights_id: differs whenever the files differ, so that cached KV rows never outlive their weights."""

    checkpoint: Checkpoint
    tokenizer: TokenizerJson | GgufVocabulary
    chat_template: str | None
    defaults: GenerationDefaults
    weights_id: bytes
    source: Path
    file_format: Literal["safetensors", "gguf", "dummy"]
