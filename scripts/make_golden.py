"""Make tests/golden: logits of transformers, in float32, that the models are compared with.

Needs an environment of its own; the tests need neither torch nor transformers:

    python -m venv golden && golden/bin/pip install torch transformers accelerate gguf
    golden/bin/python scripts/make_golden.py tiny                      # every tiny model, seconds
    golden/bin/python scripts/make_golden.py smollm2 path/to/file.gguf   # SmolLM2-135M-Instruct, about a minute

"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.models.golden import FOLDER, SMOLLM2, Golden, norm_mean, synthetic_weight

LENGTH = 72  # tokens of a tiny model's input: beyond every window and every original context below

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LLAMA = {**BASE, "model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
QWEN2 = {**BASE, "model_type": "qwen2", "hidden_act": "silu", "head_dim": None, "hidden_size": 128}
PHI3 = {**BASE, "model_type": "phi3", "hidden_act": "silu", "head_dim": None, "hidden_size": 128, "pad_token_id": 0}
GEMMA3 = {
    **BASE,
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 48,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.0 + 0.4 * i for i in range(8)],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama_tied": {
        **LLAMA,
        "tie_word_embeddings": True,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "hidden_size": 96,
    },
    "llama_bias": {**LLAMA, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "llama_linear": {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama_llama3": {**LLAMA, "rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING},
    "llama_yarn": {**LLAMA, "rope_scaling": YARN},
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 16},
    "qwen2": QWEN2,
    "qwen2_window": {**QWEN2, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen3": {**BASE, "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "head_dim": 64},
    "gemma3": GEMMA3,
    "gemma3_scaled": {**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "phi3": {**PHI3, "sliding_window": 40},
    "phi3_longrope": {
        **PHI3,
        "rope_scaling": LONGROPE,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 48,
    },
}


def tiny_model(config: dict[str, Any]) -> Any:
    """transformers' model of that config with the synthetic weights, in float32 with eager attention."""
    parameters = {key: value for key, value in config.items() if key != "model_type" and value is not None}
    settings = transformers.AutoConfig.for_model(config["model_type"], **json.loads(json.dumps(parameters)))
    model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = synthetic_weight(name, tuple(parameter.shape), norm_mean=norm_mean(config))
            parameter.copy_(torch.from_numpy(values))
    return model.eval()


def logits_of(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def make_tiny() -> None:
    ids = (np.arange(LENGTH) ** 2 * 7 % 127).tolist()
    for name, config in VARIANTS.items():
        model = tiny_model(config)
        shapes = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}  # a tied head is left out
        Golden(name, config, shapes, ids, logits_of(model, ids)).save()
        print(f"{name}: {sum(np.prod(shape) for shape in shapes.values())} weights")
    make_folder(tiny_model(VARIANTS["llama_llama3"]))


def make_folder(model: Any) -> None:
    """One model as transformers saves it: today's config keys, bfloat16 safetensors."""
    folder = FOLDER / "llama_llama3"
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n -",
    "<|im_start|>user\nWhy is the sky blue? Answer in one sentence.<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a small village between two rivers, there lived an old clockmaker who had never been "
    "late. Every morning he walked to the bridge, looked at the water, and set his watch by the mill. One winter day "
    "the mill stood still; the river had frozen over night. He waited, and for the first time in fifty years he did "
    "not know what time it was. A child came by and asked him why he was smiling. 'Because,' he said, 'today it is "
    "exactly as late as",
)
TOP = 20


def make_smollm2(path: Path) -> None:
    """transformers reads the GGUF file itself and dequantizes it to float32."""
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    file: dict[str, np.ndarray] = {"prompts": np.array(PROMPTS)}
    for i, prompt in enumerate(PROMPTS):
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        logits = logits_of(model, ids)
        best = np.argsort(-logits, axis=1, kind="stable")[:, :TOP]
        file[f"ids_{i}"] = np.array(ids, np.int32)
        file[f"top_ids_{i}"] = best.astype(np.int32)
        file[f"top_logits_{i}"] = np.take_along_axis(logits, best, axis=1)
        file[f"max_{i}"] = np.abs(logits).max(axis=1)
        file[f"last_{i}"] = logits[-1]
        print(f"{len(ids)} tokens, then {tokenizer.decode(best[-1, 0])!r}")
    np.savez_compressed(SMOLLM2, **file)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["tiny"]:
            make_tiny()
        case ["smollm2", path]:
            make_smollm2(Path(path))
        case _:
            sys.exit(__doc__)
