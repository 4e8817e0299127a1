"""What a GGUF file means in Hugging Face's words: row order, norms, names; and files that lie, up to a model."""

import math
import struct
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve import models
from minserve.backend.base import BackendError, CheckpointError
from minserve.backend.numpy_backend import NumpyBackend
from minserve.backend.tensor import Encoding, HostTensor
from minserve.text.tokenizer import Tokenizer
from minserve.weights.checkpoint import load_checkpoint
from minserve.weights.dummy import tensor_shapes
from minserve.weights.gguf_config import ARCHITECTURES
from minserve.weights.gguf_model import unpermuted
from tests.weights.build import ARRAY, FLOAT32, STRING, UINT8, UINT32, UINT64, Key, bounded_memory, gguf_model
from tests.weights.tiny_gguf import DIM, FFN, HEADS, HIDDEN, KV, VOCAB, checkpoint, keys

RNG = np.random.default_rng(3)


def converted(name: str, array: np.ndarray, heads: int) -> np.ndarray:
    """What convert_hf_to_gguf.py makes of q and k for the llama architecture (LlamaModel.permute)."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def original(model_type: str, **more: Any) -> dict[str, np.ndarray]:
    """The tensors of the tiny model as Hugging Face has them."""
    config = {
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "vocab_size": VOCAB,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": DIM,
        "num_hidden_layers": 2,
        "tie_word_embeddings": False,
    } | more
    return {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in tensor_shapes(config).items()}


def to_gguf(architecture: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Names by the gguf package's own table, values by what the conversion does."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 2)
    result = {}
    for name, array in tensors.items():
        if architecture == "llama" and "self_attn.q_proj" in name:
            array = converted(name, array, HEADS)
        if architecture == "llama" and "self_attn.k_proj" in name:
            array = converted(name, array, KV)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        stem, _, kind = name.rpartition(".")
        result[f"{table.get_name(stem)}.{kind}"] = array
    return result


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_names_and_values_come_back_as_they_were(tmp_path: Path, architecture: str) -> None:
    tensors = original(ARCHITECTURES[architecture])
    ours = checkpoint(tmp_path, gguf_model(keys(architecture), to_gguf(architecture, tensors)))
    assert set(ours.names()) == set(tensors)
    for name, array in tensors.items():
        tensor = ours.tensor(name)
        assert tensor.name == name
        np.testing.assert_allclose(tensor.float32(), array, atol=2e-7 if "norm" in name else 0, rtol=0)


def test_llamas_biases_are_reordered_too(tmp_path: Path) -> None:
    tensors = original("llama", attention_bias=True)
    ours = checkpoint(tmp_path, gguf_model(keys("llama"), to_gguf("llama", tensors)))
    name = "model.layers.1.self_attn.k_proj.bias"
    np.testing.assert_array_equal(ours.tensor(name).float32(), tensors[name])
    assert ours.config["attention_bias"] is True


def test_quantized_rows_are_reordered_without_loss() -> None:
    array = RNG.standard_normal((32, 64)).astype(np.float32)
    packed = gguf.quantize(converted("q", array, 4), gguf.GGMLQuantizationType.Q4_0)
    ours = unpermuted(HostTensor("q", (32, 64), Encoding.Q4_0, packed), 4)
    direct = gguf.quantize(array, gguf.GGMLQuantizationType.Q4_0)
    np.testing.assert_array_equal(ours.data, direct)


def test_rows_that_heads_do_not_divide_are_refused() -> None:
    with pytest.raises(CheckpointError, match="not a multiple of 2 x 4 heads"):
        unpermuted(HostTensor.from_array("q", np.zeros((12, 4), np.float32)), 4)


# bug: 76
def test_a_missing_output_matrix_means_tied_embeddings(tmp_path: Path) -> None:
    tensors = original("llama", tie_word_embeddings=True)
    ours = checkpoint(tmp_path, gguf_model(keys("llama"), to_gguf("llama", tensors)))
    assert ours.config["tie_word_embeddings"] is True
    with pytest.raises(CheckpointError, match=r"no tensor 'lm_head\.weight'"):
        ours.tensor("lm_head.weight")
    tensors = original("llama")
    ours = checkpoint(tmp_path, gguf_model(keys("llama"), to_gguf("llama", tensors)))
    assert ours.config["tie_word_embeddings"] is False


# -- damage: from the file to a model that is ready to run


HOSTILE: dict[int, tuple[Any, ...]] = {
    UINT8: (0, 255),
    UINT32: (0, 1, 3, 1 << 16, 1 << 24, (1 << 32) - 1),
    UINT64: (1 << 33, (1 << 64) - 1),
    FLOAT32: (0.0, -1.0, math.nan, math.inf, 1e-40, 3e38),
    STRING: ("", "x", "llama", "linear", "\u0107" * 9000),
    ARRAY: ((UINT32, []), (UINT32, [1 << 31] * 9), (STRING, ["a"] * 4), (FLOAT32, [math.nan] * 4)),
}
OPTIONAL = (".attention.key_length", ".attention.value_length", ".rope.dimension_count", ".rope.scaling.type",
            ".rope.scaling.factor", ".rope.scaling.original_context_length")  # fmt: skip


def replacements(architecture: str) -> st.SearchStrategy[list[Key]]:
    names = [key[0].removeprefix(architecture) for key in keys(architecture)] + list(OPTIONAL)
    values = st.sampled_from([(kind, value) for kind, values in HOSTILE.items() for value in values])
    lies = st.builds(lambda name, value: (name, *value), st.sampled_from(names), values)
    return st.lists(lies, max_size=2, unique_by=lambda lie: lie[0])


@settings(max_examples=250)
@given(data=st.data(), architecture=st.sampled_from(sorted(ARCHITECTURES)))
def test_a_lying_file_is_refused_or_makes_a_model(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, architecture: str
) -> None:
    tensors = to_gguf(architecture, original(ARCHITECTURES[architecture]))
    head = len(gguf_model(keys(architecture), dict.fromkeys(tensors, np.zeros(0)))) - 32
    content = bytearray(gguf_model(keys(architecture, *data.draw(replacements(architecture))), tensors))
    for at, byte in data.draw(st.lists(st.tuples(st.integers(0, head), st.integers(0, 255)), max_size=3)):
        content[at] = byte
    if data.draw(st.booleans()):
        struct.pack_into("<Q", content, data.draw(st.integers(0, head)), data.draw(st.sampled_from(HOSTILE[UINT64])))
    path = tmp_path_factory.getbasetemp() / "lies.gguf"
    path.write_bytes(content)
    with bounded_memory(16 << 20), patch("minserve.models.checked_config.MOST_ANGLES", 1 << 16):
        try:
            loaded = load_checkpoint(path)
            Tokenizer.from_source(loaded.tokenizer)
            models.load(loaded.checkpoint, NumpyBackend())
        except (CheckpointError, BackendError):
            pass
