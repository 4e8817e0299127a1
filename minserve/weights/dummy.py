"""Models that exist only as a name: random weights, a byte tokenizer, a chat template. Nothing is downloaded.

Owns the presets ("dummy:llama-tiny" for tests, "dummy:smollm2-135m" and larger for benchmarks of real shapes) and how
a name becomes numbers. Weights are drawn when asked for, from the seed and the tensor's name, so every run and every
order of loading gives the same model. `dummy:PRESET:ENCODING` stores them quantized, in any encoding of backend.tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minserve.backend.base import CheckpointError
from minserve.backend.tensor import BLOCKS, Bytes, Encoding, Float32, HostTensor, float32_to_bfloat16
from minserve.weights.loaded import GenerationDefaults, LoadedModel
from minserve.weights.vocabulary import TokenizerJson, byte_alphabet

# Ids 256, 257, ...; a byte is its own id.
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
_END, _TURN_END = 256, 258
_BYTE_VOCABULARY = 256 + len(SPECIALS)
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _config(
    model_type: str, hidden: int, layers: int, heads: int, kv: int, dim: int, ffn: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": _BYTE_VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    } | more


def _gemma3(layers: int, pattern: int, **more: Any) -> dict[str, Any]:
    kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": pattern,
        "layer_types": kinds,
    } | more


PRESETS: dict[str, dict[str, Any]] = {
    "llama-tiny": _config("llama", 64, 2, 4, 2, 16, 128, tie_word_embeddings=False),
    "qwen2-tiny": _config("qwen2", 64, 2, 4, 2, 16, 128),
    "qwen3-tiny": _config("qwen3", 64, 2, 4, 2, 32, 128),
    "gemma3-tiny": _config(
        "gemma3_text", 64, 4, 4, 1, 32, 128, **_gemma3(4, 2, sliding_window=32, query_pre_attn_scalar=32)
    ),
    "phi3-tiny": _config("phi3", 64, 2, 4, 2, 16, 128, tie_word_embeddings=False),
    "smollm2-135m": _config("llama", 576, 30, 9, 3, 64, 1536, vocab_size=49152, rope_theta=100000.0),
    "qwen3-0.6b": _config("qwen3", 1024, 28, 16, 8, 128, 3072, vocab_size=151936, rope_theta=1e6),
    "gemma3-270m": _config(
        "gemma3_text", 640, 18, 4, 1, 256, 2048, vocab_size=262144, rms_norm_eps=1e-6,
        **_gemma3(18, 6, sliding_window=512, query_pre_attn_scalar=256),
    ),
    "llama-1b": _config("llama", 2048, 16, 32, 8, 64, 8192, vocab_size=128256, rope_theta=500000.0),
    "llama-8b": _config(
        "llama", 4096, 32, 32, 8, 128, 14336, vocab_size=128256, rope_theta=500000.0, tie_word_embeddings=False
    ),
}  # fmt: skip


def is_dummy(name: str) -> bool:
    return name == "dummy" or name.startswith("dummy:")


def load_dummy(name: str, seed: int = 0) -> LoadedModel:
    """`dummy`, `dummy:PRESET` or `dummy:PRESET:ENCODING` (F32 unless named)."""
    _, _, rest = name.partition(":")
    preset, _, encoding = rest.partition(":")
    preset = preset or "llama-tiny"
    if preset not in PRESETS:
        raise CheckpointError(f"there is no dummy model {preset!r}; there are {', '.join(PRESETS)}")
    if encoding and encoding.upper() not in Encoding.__members__:
        raise CheckpointError(f"there is no encoding {encoding!r}; there are {', '.join(Encoding)}")
    checkpoint = DummyCheckpoint(PRESETS[preset], seed, Encoding(encoding.upper() or "F32"))
    return LoadedModel(
        checkpoint=checkpoint,
        tokenizer=byte_tokenizer(checkpoint.config["vocab_size"]),
        chat_template=_TEMPLATE,
        defaults=GenerationDefaults(),
        weights_id=hashlib.sha256(f"{name}:{seed}".encode()).digest(),
        source=Path(name),
        file_format="dummy",
    )


class DummyCheckpoint:
    """A Checkpoint of random weights for any config of a known family. Linear weights and embeddings are stored in
    `encoding`, as a file would; norms and biases (and rows that no block fits) in float32."""

    def __init__(self, config: Mapping[str, Any], seed: int = 0, encoding: Encoding = Encoding.F32) -> None:
        self.config = config
        self._seed = seed
        self._encoding = encoding
        self._shapes = tensor_shapes(config)

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def tensor(self, name: str) -> HostTensor:
        if name not in self._shapes:
            raise CheckpointError(f"a dummy {self.config['model_type']} has no tensor {name!r}")
        rows, *rest = self._shapes[name]
        key = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(key[:8], "little"))
        if not rest:
            noise = 0.1 * rng.standard_normal(rows, np.float32)
            plain = name.endswith(".bias") or self.config["model_type"] == "gemma3_text"  # whose norms are 1 + w
            return HostTensor.from_array(name, noise if plain else 1 + noise)
        cols = rest[0]
        encoding = Encoding.F32 if cols % BLOCKS[self._encoding].weights else self._encoding
        return random_tensor(name, (rows, cols), encoding, rng, cols**-0.5)


def random_tensor(
    name: str, shape: tuple[int, int], encoding: Encoding, rng: np.random.Generator, spread: float
) -> HostTensor:
    """[rows, cols] with mean near 0 and standard deviation near `spread`. Quantized: random bits, fitting scales."""
    if encoding in (Encoding.F32, Encoding.F16, Encoding.BF16):
        values: Float32 = spread * rng.standard_normal(shape, np.float32)
        halves = float32_to_bfloat16(values) if encoding is Encoding.BF16 else values.astype(np.float16)
        stored = values if encoding is Encoding.F32 else halves
        return HostTensor(name, shape, encoding, stored.view(np.uint8))
    rows, cols = shape
    block = BLOCKS[encoding]
    data = rng.integers(0, 256, (rows, cols // block.weights, block.nbytes), np.uint8)
    tensor = HostTensor(name, shape, encoding, data.reshape(rows, -1))
    _write_scales(data, encoding, 1.0)
    unit = float(tensor.slice_rows(0, min(rows, 8)).float32().std())
    _write_scales(data, encoding, spread / unit)
    return tensor


_SCALES: dict[Encoding, tuple[tuple[int, float], ...]] = {  # (byte of a float16, its value for a unit scale and mean 0)
    Encoding.Q8_0: ((0, 1.0),),
    Encoding.Q4_0: ((0, 1.0),),
    Encoding.Q5_0: ((0, 1.0),),
    Encoding.Q4_1: ((0, 1.0), (2, -7.5)),
    Encoding.Q5_1: ((0, 1.0), (2, -15.5)),
    Encoding.Q4_K: ((0, 1.0), (2, 7.5)),
    Encoding.Q5_K: ((0, 1.0), (2, 15.5)),
    Encoding.Q6_K: ((208, 1.0),),
}


def _write_scales(blocks: Bytes, encoding: Encoding, scale: float) -> None:
    for at, value in _SCALES[encoding]:
        blocks[..., at : at + 2] = np.array([value * scale], np.float16).view(np.uint8)


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that a checkpoint of this config holds, by Hugging Face's names."""
    family, d, ffn, vocab = (config[key] for key in ("model_type", "hidden_size", "intermediate_size", "vocab_size"))
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
    layer |= {"self_attn.o_proj.weight": (d, q), "mlp.down_proj.weight": (d, ffn)}
    if family == "phi3":
        layer |= {"self_attn.qkv_proj.weight": (q + 2 * kv, d), "mlp.gate_up_proj.weight": (2 * ffn, d)}
    else:
        layer |= {f"self_attn.{x}_proj.weight": (n, d) for x, n in (("q", q), ("k", kv), ("v", kv))}
        layer |= {"mlp.gate_proj.weight": (ffn, d), "mlp.up_proj.weight": (ffn, d)}
    if family == "qwen2" or config.get("attention_bias"):
        layer |= {f"self_attn.{x}_proj.bias": (n,) for x, n in (("q", q), ("k", kv), ("v", kv))}
    if family in ("qwen3", "gemma3_text"):
        layer |= {"self_attn.q_norm.weight": (config["head_dim"],), "self_attn.k_norm.weight": (config["head_dim"],)}
    if family == "gemma3_text":
        layer |= {"pre_feedforward_layernorm.weight": (d,), "post_feedforward_layernorm.weight": (d,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, d)
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def byte_tokenizer(vocab_size: int = _BYTE_VOCABULARY) -> TokenizerJson:
    """A tokenizer.json whose ids 0..255 are the bytes, then SPECIALS, then made-up words up to vocab_size.

    Text is encoded byte by byte (there are no merges); the words are only ever produced by a model.
    """
    vocab = byte_alphabet() | {text: 256 + i for i, text in enumerate(SPECIALS)}
    vocab |= {"Ġ" + _word(i): i for i in range(_BYTE_VOCABULARY, vocab_size)}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model: dict[str, Any] = {"type": "BPE", "vocab": vocab, "merges": [], "fuse_unk": False, "byte_fallback": False}
    added = [
        {"id": 256 + i, "content": text, "special": "think" not in text} | special for i, text in enumerate(SPECIALS)
    ]
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model,
    }  # fmt: skip
    end = frozenset({_END, _TURN_END})
    return TokenizerJson(json.dumps(content).encode(), SPECIALS[0], SPECIALS[2], add_bos=False, end_ids=end)


def _word(number: int) -> str:
    """Syllables that spell the number: readable nonsense."""
    text = ""
    while number:
        number, digit = divmod(number, 85)
        text += "bcdfghjklmnprstvz"[digit // 5] + "aeiou"[digit % 5]
    return text
