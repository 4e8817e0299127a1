"""What a GGUF file means in Hugging Face's words: row order, norms, names, config, vocabulary."""

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
from minserve.weights.gguf_file import read_gguf
from minserve.weights.gguf_metadata import Metadata, vocabulary
from minserve.weights.gguf_model import GgufCheckpoint, unpermuted
from tests.weights.build import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    STRING,
    UINT8,
    UINT32,
    UINT64,
    VOCABULARY,
    Key,
    bounded_memory,
    gguf_model,
)

RNG = np.random.default_rng(3)
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


def checkpoint(folder: Path, content: bytes) -> GgufCheckpoint:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return GgufCheckpoint(read_gguf(path))


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


EMBEDDING = {"token_embd.weight": np.zeros((VOCAB, HIDDEN), np.float32)}


def config(folder: Path, architecture: str, *more: Key, leave: str = "", **arrays: np.ndarray) -> dict[str, Any]:
    tensors = EMBEDDING | {name.replace("__", "."): array for name, array in arrays.items()}
    return dict(checkpoint(folder, gguf_model(keys(architecture, *more, leave=leave), tensors)).config)


def test_llamas_config(tmp_path: Path) -> None:
    assert config(tmp_path, "llama") == {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": DIM,
        "rms_norm_eps": 2**-20,
        "rope_theta": 50000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def test_gemmas_config_has_what_the_file_only_implies(tmp_path: Path) -> None:
    got = config(tmp_path, "gemma3", (".block_count", UINT32, 7), (".attention.key_length", UINT32, 16),
                 (".attention.value_length", UINT32, 16))  # fmt: skip
    assert got["model_type"] == "gemma3_text"
    assert got["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert (got["sliding_window"], got["sliding_window_pattern"]) == (64, 6)
    assert (got["rope_local_base_freq"], got["query_pre_attn_scalar"], got["head_dim"]) == (10000.0, 16, 16)
    assert got["hidden_activation"] == "gelu_pytorch_tanh"
    assert config(tmp_path, "gemma3", (".block_count", UINT32, 62))["query_pre_attn_scalar"] == HIDDEN // HEADS


def test_rope_scaling_becomes_hugging_faces(tmp_path: Path) -> None:
    linear = config(tmp_path, "llama", (".rope.scaling.type", STRING, "linear"), (".rope.scaling.factor", FLOAT32, 4.0))
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert config(tmp_path, "llama", (".rope.scale_linear", FLOAT32, 2.0))["rope_scaling"]["factor"] == 2.0
    yarn = config(
        tmp_path,
        "qwen2",
        (".rope.scaling.type", STRING, "yarn"),
        (".rope.scaling.factor", FLOAT32, 4.0),
        (".rope.scaling.original_context_length", UINT32, 128),
    )["rope_scaling"]
    assert (yarn["rope_type"], yarn["factor"], yarn["original_max_position_embeddings"]) == ("yarn", 4.0, 128)
    assert yarn["attention_factor"] == pytest.approx(0.1 * np.log(4.0) + 1)
    factors = np.array([1, 1, 4, 8], np.float32)
    llama3 = config(tmp_path, "llama", rope_freqs__weight=factors)["rope_scaling"]
    assert (llama3["rope_type"], llama3["attention_factor"]) == ("longrope", 1.0)
    assert llama3["long_factor"] == llama3["short_factor"] == [1.0, 1.0, 4.0, 8.0]
    long = config(
        tmp_path,
        "phi3",
        (".rope.scaling.original_context_length", UINT32, 64),
        (".rope.scaling.attn_factor", FLOAT32, 1.25),
        (".attention.sliding_window", UINT32, 128),
        rope_factors_long__weight=factors * 2,
        rope_factors_short__weight=factors,
    )
    assert long["rope_scaling"]["long_factor"] == [2.0, 2.0, 8.0, 16.0]
    assert long["rope_scaling"]["original_max_position_embeddings"] == 64
    assert long["rope_scaling"]["attention_factor"] == 1.25
    assert long["sliding_window"] == 128


def test_part_of_a_head_may_rotate(tmp_path: Path) -> None:
    assert config(tmp_path, "phi3", (".rope.dimension_count", UINT32, 4))["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("general.architecture", STRING, "mamba"), "'mamba' is not known; known are gemma3, llama"),
        ((".block_count", UINT32, 0), r"llama\.block_count must be a whole number from 1"),
        ((".block_count", UINT32, (1 << 32) - 1), r"llama\.block_count must be"),
        ((".block_count", STRING, "2"), r"llama\.block_count must be a whole number"),
        ((".block_count", BOOL, True), r"llama\.block_count must be a whole number"),
        ((".embedding_length", UINT32, 64), r"embedding_length is 64, but token_embd\.weight has 32"),
        ((".attention.head_count", UINT32, 33), "head_count must be a whole number from 1 to 32"),
        ((".attention.head_count", ARRAY, (UINT32, [4, 2])), "differs between layers"),
        ((".attention.head_count_kv", UINT32, 5), "head_count_kv must be a whole number from 1 to 4"),
        ((".attention.key_length", UINT32, 1 << 30), "key_length must be"),
        ((".attention.value_length", UINT32, 16), "value_length differs"),
        ((".attention.layer_norm_rms_epsilon", FLOAT32, float("nan")), "epsilon must be a number from"),
        ((".rope.freq_base", FLOAT32, -1.0), "freq_base must be a number from 1"),
        ((".rope.dimension_count", UINT32, 16), "dimension_count must be"),
        ((".rope.scaling.type", STRING, "magic"), "'magic' is not supported"),
        ((".expert_count", UINT32, 8), "mixtures of experts"),
    ],
)
# bug: 79
def test_metadata_that_lies_is_refused(tmp_path: Path, more: Key, message: str) -> None:
    name = more[2] if more[0] == "general.architecture" else "llama"
    with pytest.raises(CheckpointError, match=message):
        config(tmp_path, name, more)


def test_equal_numbers_per_layer_count_as_one(tmp_path: Path) -> None:
    assert config(tmp_path, "llama", (".feed_forward_length", ARRAY, (UINT32, [64, 64])))["intermediate_size"] == 64


def test_a_missing_key_or_embedding_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no llama\.context_length"):
        config(tmp_path, "llama", leave=".context_length")
    with pytest.raises(CheckpointError, match=r"no token_embd\.weight"):
        checkpoint(tmp_path, gguf_model(keys("llama"), {}))


def test_factors_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the shape"):
        config(tmp_path, "llama", rope_freqs__weight=np.ones(5, np.float32))
    with pytest.raises(CheckpointError, match="not positive"):
        config(tmp_path, "llama", rope_freqs__weight=np.zeros(4, np.float32))


def words(folder: Path, *more: Key, leave: str = "") -> Any:
    path = folder / "model.gguf"
    path.write_bytes(gguf_model(keys("llama", *more, leave=leave), EMBEDDING))
    return vocabulary(Metadata(read_gguf(path).metadata))


def test_the_vocabulary_is_read(tmp_path: Path) -> None:
    v = words(
        tmp_path, ("tokenizer.ggml.eot_token_id", UINT32, 3), ("tokenizer.ggml.bos_token_id", UINT32, (1 << 32) - 1)
    )
    assert (v.model, v.pre, v.tokens, v.merges) == ("gpt2", "smollm", ["<|end|>", "a", "b", "ab"], ["a b"])
    assert (v.bos_id, v.eos_id, v.end_ids) == (None, 0, {0, 3})
    assert (v.add_bos, v.add_space_prefix, v.scores) == (False, False, [])


def test_sentencepiece_vocabularies_start_with_bos_and_a_space_unless_they_say_otherwise(tmp_path: Path) -> None:
    more = (
        ("tokenizer.ggml.model", STRING, "llama"),
        ("tokenizer.ggml.scores", ARRAY, (FLOAT32, [0.0, -1.0, -2.0, -3.0])),
    )
    v = words(tmp_path, *more)
    assert (v.add_bos, v.add_space_prefix, v.scores) == (True, True, [0.0, -1.0, -2.0, -3.0])
    assert words(tmp_path, *more, ("tokenizer.ggml.add_space_prefix", BOOL, False)).add_space_prefix is False


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("tokenizer.ggml.tokens", ARRAY, (UINT8, [1, 2, 3])), "tokens must be an array of strings"),
        (("tokenizer.ggml.tokens", STRING, "abc"), "tokens must be an array of strings"),
        (("tokenizer.ggml.tokens", ARRAY, (STRING, [])), "no vocabulary"),
        (("tokenizer.ggml.token_type", ARRAY, (INT32, [1])), "has 1 entries, not 4"),
        (("tokenizer.ggml.token_type", ARRAY, (INT32, [1, 1, 1, 99])), "no token type"),
        (("tokenizer.ggml.token_type", ARRAY, (FLOAT32, [1.0] * 4)), "array of numbers"),
        (("tokenizer.ggml.scores", ARRAY, (STRING, ["a"] * 4)), "array of numbers"),
        (("tokenizer.ggml.merges", UINT32, 7), "merges must be an array of strings"),
        (("tokenizer.ggml.eos_token_id", FLOAT32, 1.0), "eos_token_id must be a whole number"),
        (("tokenizer.ggml.add_bos_token", UINT32, 1), "must be true or false"),
    ],
)
# bug: 79
def test_a_vocabulary_that_lies_is_refused(tmp_path: Path, more: Key, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        words(tmp_path, more)


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


@settings(max_examples=250, deadline=None)
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
