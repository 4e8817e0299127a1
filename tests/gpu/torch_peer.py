"""The same shapes in PyTorch + transformers on the same card: random weights, static cache, compiled decode.

Runs in a process of its own (`python -m tests.gpu.torch_peer '{"preset": ..., ...}'`), so that neither side holds the
other's memory, and prints a line of JSON for each batch as soon as it is measured: {"batch": ..., "decode": tokens/s,
"prefill": tokens/s, "versions": ...}. generate() compiles the decode step itself when the cache is static, and never
the prefill. Decode is timed between a shorter and a longer answer, so that the prompt and the compilation don't count.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
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


def measure(preset: str, batches: Sequence[int], context: int, device: str) -> Iterator[dict[str, Any]]:
    import torch
    import transformers

    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config_of(preset))).eval()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
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
            for new in (LONG, SHORT):  # a cache that grew would be compiled for twice
                seconds(new)
            decode = batch * (LONG - SHORT) / (seconds(LONG) - seconds(SHORT))
            prefill = batch * context / seconds(1)
        yield {"batch": batch, "decode": decode, "prefill": prefill, "versions": versions}


if __name__ == "__main__":
    for line in measure(**json.loads(sys.argv[1])):
        print(json.dumps(line), flush=True)
