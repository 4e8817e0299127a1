"""Tiny models whose weights are a function of their names, and the logits that transformers computes with them.

A golden file holds a config, the shapes of the weights, token ids and transformers' float32 logits, not the weights:
scripts/make_golden.py and the tests make the same ones from here. They are exact in bfloat16.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minserve.backend.base import CheckpointError
from minserve.backend.tensor import Encoding, HostTensor, bfloat16_to_float32, float32_to_bfloat16

FOLDER = Path(__file__).parent.parent / "golden"
SMOLLM2 = FOLDER / "smollm2.npz"


def synthetic_weight(name: str, shape: tuple[int, ...], *, norm_mean: float = 1.0) -> np.ndarray:
    """A float32 array that depends on nothing but the name and the shape, in sizes that keep activations near 1."""
    unit = _uniforms(name, int(np.prod(shape))).reshape(shape)
    if name.endswith("norm.weight"):
        values = norm_mean + 0.3 * unit
    elif len(shape) == 1:
        values = 0.3 * unit
    elif "embed_tokens" in name:
        values = 0.3 * unit  # small beside the layers, so that these matter where it is the head too
    else:
        values = unit * np.sqrt(3 / shape[-1])
    return bfloat16_to_float32(float32_to_bfloat16(values.astype(np.float32)))


def _uniforms(name: str, count: int) -> np.ndarray:
    """Uniform in [-1, 1): splitmix64 in counter mode, so that no library's generator may change under us."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):
        x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(40)).astype(np.float64) / (1 << 23) - 1


def norm_mean(config: Mapping[str, Any]) -> float:
    """Gemma multiplies by 1 + w."""
    return 0.0 if config["model_type"].startswith("gemma") else 1.0


class SyntheticCheckpoint:
    """A Checkpoint in memory: tensors by name, made when asked for, unless `changed` holds them."""

    def __init__(
        self,
        config: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        changed: Mapping[str, np.ndarray] | None = None,
        *,
        encoding: Encoding = Encoding.F32,
    ) -> None:
        self.config = config
        self._shapes = dict(shapes)
        self._changed = changed or {}
        self._encoding = encoding

    def names(self) -> Iterable[str]:
        return {*self._shapes, *self._changed}

    def tensor(self, name: str) -> HostTensor:
        if name in self._changed:
            return HostTensor.from_array(name, self._changed[name])
        if name not in self._shapes:
            raise CheckpointError(f"the file has no tensor {name!r}")
        values = synthetic_weight(name, self._shapes[name], norm_mean=norm_mean(self.config))
        if self._encoding is Encoding.F32:
            return HostTensor.from_array(name, values)
        bits = float32_to_bfloat16(values) if self._encoding is Encoding.BF16 else values.astype(np.float16)
        return HostTensor(name, values.shape, self._encoding, bits.view(np.uint8).reshape(-1, values.shape[-1] * 2))


@dataclass(frozen=True)
class Golden:
    """config: config.json's content. shapes: of the weights by name. ids [n]. logits [n, V]: transformers' float32."""

    name: str
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    ids: list[int]
    logits: np.ndarray

    def checkpoint(self, **changed: Any) -> SyntheticCheckpoint:
        """changed: config values to override."""
        return SyntheticCheckpoint({**self.config, **changed}, self.shapes)

    def save(self) -> None:
        np.savez_compressed(
            FOLDER / f"{self.name}.npz",
            config=np.array(json.dumps(self.config)),
            shapes=np.array(json.dumps(self.shapes)),
            ids=np.array(self.ids, np.int32),
            logits=self.logits.astype(np.float32),
        )

    @classmethod
    def read(cls, name: str) -> Golden:
        with np.load(FOLDER / f"{name}.npz") as file:
            shapes = {key: tuple(shape) for key, shape in json.loads(str(file["shapes"])).items()}
            return cls(name, json.loads(str(file["config"])), shapes, file["ids"].tolist(), file["logits"])


def golden_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.npz") if path != SMOLLM2)
