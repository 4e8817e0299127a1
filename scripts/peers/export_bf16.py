"""A GGUF model as a Hugging Face folder of bf16 safetensors, for peers that read nothing else.

python export_bf16.py MODEL.gguf FOLDER
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from minserve.backend.tensor import float32_to_bfloat16
from minserve.text.rebuild import gguf_document
from minserve.weights.checkpoint import load_checkpoint
from minserve.weights.vocabulary import GgufVocabulary


def main() -> None:
    loaded = load_checkpoint(Path(sys.argv[1]))
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, object] = {}
    chunks: list[bytes] = []
    offset = 0
    for name in loaded.checkpoint.names():
        tensor = loaded.checkpoint.tensor(name)
        data = float32_to_bfloat16(np.ascontiguousarray(tensor.float32())).tobytes()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, offset + len(data)]}
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(chunks)
    vocabulary = loaded.tokenizer
    assert isinstance(vocabulary, GgufVocabulary)
    config = dict(loaded.checkpoint.config, architectures=["LlamaForCausalLM"], torch_dtype="bfloat16")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": loaded.chat_template,
        "eos_token": vocabulary.tokens[vocabulary.eos_id or 0],
    }
    files = {"config.json": config, "tokenizer.json": gguf_document(vocabulary), "tokenizer_config.json": settings}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


main()
