"""GGUF metadata as Hugging Face's config.json."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minserve.backend.base import CheckpointError
from tests.weights.build import ARRAY, BOOL, FLOAT32, STRING, UINT32, Key, gguf_model
from tests.weights.tiny_gguf import DIM, EMBEDDING, FFN, HEADS, HIDDEN, KV, VOCAB, checkpoint, keys


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
