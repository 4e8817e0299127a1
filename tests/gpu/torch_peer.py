"""The same shapes in PyTorch + transformers on the same card: random weights, static cache, compiled decode.

Runs in a process of its own (`python -m tests.gpu.torch_peer '{"preset": ..., ...}'`), so that neither side holds the
other's memory, and prints one line of JSON: {"rates": {batch: decode tokens/s}, "versions": ...}. generate() compiles
the decode step itself when the cache is static. The rate is taken between a shorter and a longer answer, so that
the prompt and the compilation don't count.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from minserve.weights.dummy import PRESETS

SHORT, LONG = 16, 80  # new tokens


def config_of(preset: str) -> dict[str, Any]:
    """transformers' LlamaConfig for a preset of ours."""
    known = PRESETS[preset]
    return {name: value for name, value in known.items() if name not in ("model_type", "hidden_act")} | {
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }


def measure(preset: str, batches: list[int], context: int, device: str) -> Mapping[str, Any]:
    import torch
    import transformers

    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config_of(preset))).eval()
    rates: dict[int, float] = {}
    for batch in batches:
        prompt = torch.randint(5, 200, (batch, context), device=device)
        options = {"do_sample": False, "cache_implementation": "static", "attention_mask": torch.ones_like(prompt)}

        def seconds(new: int, prompt: Any = prompt, options: Any = options) -> float:
            began = time.perf_counter()
            model.generate(prompt, min_new_tokens=new, max_new_tokens=new, **options)
            if device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - began

        with torch.inference_mode():
            for new in (SHORT, LONG):  # compiles for both lengths of the cache
                seconds(new)
            rates[batch] = batch * (LONG - SHORT) / (seconds(LONG) - seconds(SHORT))
    return {"rates": rates, "versions": f"torch {torch.__version__}, transformers {transformers.__version__}"}


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
