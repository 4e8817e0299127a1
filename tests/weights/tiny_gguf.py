"""The metadata and the tensors of a tiny model in a GGUF file."""

from pathlib import Path

import numpy as np

from minserve.weights.gguf_file import read_gguf
from minserve.weights.gguf_model import GgufCheckpoint
from tests.weights.build import FLOAT32, STRING, UINT32, VOCABULARY, Key

HEADS, KV, DIM, HIDDEN, FFN, VOCAB = 4, 2, 8, 32, 64, 4


def keys(architecture: str, *more: Key, leave: str = "") -> list[Key]:
    """The metadata of a tiny model. `more` replaces keys of the same name; names starting with a dot get the prefix."""
    base: list[Key] = [
        ("general.architecture", STRING, architecture),
        (".block_count", UINT32, 2),
        (".context_length", UINT32, 512),
        (".embedding_length", UINT32, HIDDEN),
        (".feed_forward_length", UINT32, FFN),
        (".attention.head_count", UINT32, HEADS),
        (".attention.head_count_kv", UINT32, KV),
        (".attention.layer_norm_rms_epsilon", FLOAT32, 2**-20),
        (".rope.freq_base", FLOAT32, 50000.0),
        (".attention.sliding_window", UINT32, 64) if architecture == "gemma3" else (".vocab_size", UINT32, VOCAB),
        *VOCABULARY,
    ]
    names = [key[0] for key in more]
    merged = [key for key in base if key[0] not in names and key[0] != leave] + list(more)
    return [(architecture + name if name.startswith(".") else name, kind, value) for name, kind, value in merged]


def checkpoint(folder: Path, content: bytes) -> GgufCheckpoint:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return GgufCheckpoint(read_gguf(path))


EMBEDDING = {"token_embd.weight": np.zeros((VOCAB, HIDDEN), np.float32)}
