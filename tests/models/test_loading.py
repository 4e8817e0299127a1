"""What a model file refuses, and what it makes of configs and files as they come."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from minserve.backend.base import CheckpointError
from minserve.backend.numpy_backend import NumpyBackend
from minserve.backend.tensor import Encoding
from minserve.models import Model, checked_config, load
from tests.models.golden import Golden, SyntheticCheckpoint, synthetic_weight
from tests.models.test_golden import BLOCKS, REFERENCE, difference, program_for, run

HEAD = "lm_head.weight"


def changed(name: str, shapes: dict[str, Any] | None = None, **config: Any) -> SyntheticCheckpoint:
    """A golden's checkpoint with config values and shapes changed; a shape of None removes the tensor."""
    golden = Golden.read(name)
    merged = {key: shape for key, shape in {**golden.shapes, **(shapes or {})}.items() if shape is not None}
    return SyntheticCheckpoint({**golden.config, **config}, merged)


def load_numpy(checkpoint: SyntheticCheckpoint, max_model_len: int = 0) -> Model:
    return load(checkpoint, NumpyBackend(), max_model_len)


def test_unknown_model_type_lists_the_known() -> None:
    with pytest.raises(CheckpointError, match=r"'mamba' is not known; known are gemma3, .*llama.*qwen3"):
        load_numpy(changed("llama", model_type="mamba"))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "no tensor 'model.layers.1.mlp.up_proj.weight'"),
        (
            {"model.layers.0.self_attn.q_proj.weight": (64, 128)},
            r"'model.layers.0.self_attn.q_proj.weight' has the shape (64, 128), the config promises (128, 64)",
        ),
        ({"model.norm.weight": (63,)}, "the shape (63,), the config promises (64,)"),
        ({"model.embed_tokens.weight": (127, 64)}, "the shape (127, 64), the config promises (128, 64)"),
        ({"model.layers.0.self_attn.q_proj.bias": (128,)}, "doesn't use: model.layers.0.self_attn.q_proj.bias"),
        ({f"model.layers.2.x{i}": (1,) for i in range(5)}, "model.layers.2.x2 and 2 more"),
    ],
)
def test_missing_misshapen_and_unused_tensors_are_named(shapes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_numpy(changed("llama", shapes))


def test_buffers_that_exporters_store_are_ignored() -> None:
    load_numpy(changed("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": (16,)}))


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ("llama", {"hidden_size": "64"}, "hidden_size must be an integer"),
        ("llama", {"hidden_size": True}, "hidden_size must be an integer"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer in 1..4096"),
        ("llama", {"vocab_size": None}, "vocab_size must be an integer"),
        ("llama", {"vocab_size": -1}, "vocab_size must be an integer"),
        ("llama", {"num_key_value_heads": 3}, "don't divide into 3 groups"),
        ("llama", {"head_dim": None, "num_attention_heads": 6}, "hidden_size 64 is not a multiple of 6"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ("llama", {"attention_bias": 1}, "attention_bias must be true or false"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ("llama", {"rope_theta": 0.5}, "rope_theta must be more than 1"),
        ("llama", {"rope_scaling": [2]}, "rope_scaling must be an object"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type 'dynamic' is not supported, only"),
        ("llama", {"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type ['yarn'] is not supported"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor must be a positive number, found None"),
        ("llama", {"partial_rotary_factor": 0.03}, "partial_rotary_factor 0.03 of head_dim 32"),
        ("llama_llama3", {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor must be"),
        ("phi3_longrope", {"partial_rotary_factor": 1.0}, "long_factor must be a list of 16 positive numbers"),
        ("qwen2", {"layer_types": ["full_attention", "mamba"]}, "layer_types must be 2 times"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types must be 2 times"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be an integer in 1.."),
        ("gemma3", {"hidden_activation": "relu"}, "hidden_activation = 'relu' is not supported"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        ("gemma3", {"text_config": 5}, "text_config must be an object"),
        ("gemma3", {"rope_parameters": {"full_attention": 5}}, "rope_parameters must hold an object"),
    ],
)
def test_config_values_that_would_be_wrong_are_refused_by_name(name: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_numpy(changed(name, **config))


def test_max_model_len_is_the_models_own_unless_shorter() -> None:
    checkpoint = changed("llama")
    assert load_numpy(checkpoint).spec.max_model_len == 256
    assert load_numpy(checkpoint, 100).spec.max_model_len == 100
    with pytest.raises(CheckpointError, match="max_model_len 257 is more than the 256 tokens"):
        load_numpy(checkpoint, 257)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert load_numpy(changed("llama", rope_scaling=yarn)).spec.max_model_len == 1024


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "phi3"])
def test_a_config_that_claims_a_huge_context_gets_no_huge_tables(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless the operator asks for them, which the log says."""
    monkeypatch.setattr(checked_config, "MOST_ANGLES", 3200)
    checkpoint = changed(name, max_position_embeddings=1 << 24)
    tokens = load_numpy(checkpoint).spec.max_model_len
    assert 100 <= tokens <= 800, "heads of 8 to 64 have 4 to 32 pairs"
    assert f"max_model_len is {tokens}; the model says {1 << 24}" in caplog.text
    caplog.clear()
    assert load_numpy(checkpoint, 1000).spec.max_model_len == 1000
    assert not caplog.text


# bug: 76
@pytest.mark.parametrize(
    ("tie", "stored", "tied"),
    [
        (True, False, True),
        (True, True, True),  # the flag wins over a head that is stored all the same
        (False, True, False),
        (None, True, False),
        (None, False, True),
    ],
)
def test_head_is_tied_by_flag_and_presence(tie: bool | None, stored: bool, tied: bool) -> None:
    golden = Golden.read("llama")
    program = program_for(changed("llama", {} if stored else {HEAD: None}, tie_word_embeddings=tie))
    logits = run(program, golden.ids, 0, BLOCKS)
    embedding = synthetic_weight("model.embed_tokens.weight", (128, 64))
    head = synthetic_weight(HEAD, (128, 64))
    if tied:  # the golden's logits came from the head: bring them over
        hidden = np.linalg.lstsq(head.astype(np.float64), golden.logits.T.astype(np.float64), rcond=None)[0]
        assert difference(logits, (embedding @ hidden).T) <= REFERENCE
    else:
        assert difference(logits, golden.logits) <= REFERENCE


# bug: 76
def test_head_that_is_neither_stored_nor_tied_is_an_error() -> None:
    with pytest.raises(CheckpointError, match=re.escape(HEAD)):
        load_numpy(changed("llama", {HEAD: None}, tie_word_embeddings=False))


# bug: 76
@pytest.mark.parametrize(
    "prefix", [("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")]
)
@pytest.mark.parametrize(("outer", "inner", "tied"), [(None, None, True), (False, None, False), (False, True, True)])
def test_multimodal_gemma3_gives_its_language_model(
    prefix: tuple[str, str], outer: bool | None, inner: bool | None, tied: bool
) -> None:
    """Both layouts of names; the vision tower is left alone; the tie flag may stand on either level."""
    golden = Golden.read("gemma3")
    text = {**golden.config, "tie_word_embeddings": inner}
    weights = {key: synthetic_weight(key, shape, norm_mean=0.0) for key, shape in golden.shapes.items()}
    weights[HEAD] = -weights["model.embed_tokens.weight"]
    stored = {
        key.replace("model.", prefix[0], 1).replace("lm_head.", prefix[1], 1): value for key, value in weights.items()
    }
    stored["vision_tower.patch.weight"] = np.ones((3, 3), np.float32)
    config: dict[str, Any] = {"model_type": "gemma3", "text_config": {k: v for k, v in text.items() if v is not None}}
    if outer is not None:
        config["tie_word_embeddings"] = outer
    logits = run(program_for(SyntheticCheckpoint(config, {}, stored)), golden.ids, 0, BLOCKS)
    assert difference(logits if tied else -logits, golden.logits) <= REFERENCE


def test_gemma3_fills_in_what_published_configs_leave_out() -> None:
    """google/gemma-3-*: a text_config of a few keys; transformers' class has the rest as defaults."""
    golden = Golden.read("gemma3")
    shapes = {
        name: tuple({128: 2048, 32: 256}.get(n, n) if "self_attn" in name else n for n in shape)
        for name, shape in golden.shapes.items()
    }
    for layer in range(3):
        for part in ("k_proj", "v_proj"):
            shapes[f"model.layers.{layer}.self_attn.{part}.weight"] = (1024, 64)
    shapes["model.embed_tokens.weight"] = (262208, 64)
    text = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    text |= {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    model = load_numpy(SyntheticCheckpoint({"model_type": "gemma3", "text_config": text}, shapes), 128)
    assert model.spec.vocab_size == 262208
    assert [(kv.kv_heads, kv.head_dim, kv.window) for kv in model.spec.kv] == [(4, 256, 1024)] * 3


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (
            "gemma3_scaled",
            ("rope_scaling", "rope_theta", "rope_local_base_freq"),
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        (
            "llama_yarn",
            ("rope_scaling", "rope_theta"),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
        ),
    ],
)
def test_rope_keys_of_transformers_5_mean_the_same(name: str, old: tuple[str, ...], new: dict[str, Any]) -> None:
    golden = Golden.read(name)
    program = program_for(golden.checkpoint(**dict.fromkeys(old), rope_parameters=new))
    assert difference(run(program, golden.ids, 0, BLOCKS), golden.logits) <= REFERENCE


def test_spec_counts_what_a_step_reads_and_computes() -> None:
    spec = load_numpy(changed("llama")).spec
    layer = 64 * (128 + 64 + 64) + 128 * 64 + 3 * 64 * 96
    assert spec.flops_per_token == 2 * 2 * layer
    assert spec.head_flops == 2 * 128 * 64
    assert spec.weight_bytes == 4 * (2 * layer + 128 * 64 + 5 * 64)


# bug: 81
@pytest.mark.parametrize("encoding", [Encoding.BF16, Encoding.F16])
@pytest.mark.parametrize("family", sorted({"llama_bias", "phi3", "gemma3"}))
def test_half_precision_files_give_the_logits_of_their_exact_values(family: str, encoding: Encoding) -> None:
    """The synthetic weights are exact in bfloat16; float16 rounds those below its normal range."""
    golden = Golden.read(family)
    checkpoint = SyntheticCheckpoint(golden.config, golden.shapes, encoding=encoding)
    logits = run(program_for(checkpoint), golden.ids, 0, BLOCKS)
    assert logits.dtype == np.float32
    assert difference(logits, golden.logits) <= REFERENCE
