"""Files made by hand, so that a test can make them lie, and a bound on what reading them may allocate."""

import json
import struct
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from minserve.backend.tensor import BLOCKS, Encoding

UINT8, INT32, UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 5, 4, 6, 7, 8, 9, 10
_FORMATS = {UINT8: "<B", INT32: "<i", UINT32: "<I", FLOAT32: "<f", BOOL: "<?", UINT64: "<Q"}
TENSOR_TYPES = {Encoding.F32: 0, Encoding.F16: 1, Encoding.Q4_0: 2, Encoding.Q8_0: 8, Encoding.BF16: 30}

Key = tuple[str, int, Any]  # name, type, value; for an array the value is (type, [values])
Tensor = tuple[str, Sequence[int], int, int]  # name, columns first, type, offset


@contextmanager
def bounded_memory(limit: int = 4 << 20) -> Iterator[None]:
    """Fails if the block allocates more than `limit` bytes at once."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak} bytes were allocated"


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return gguf_string(value)
    if kind == ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(gguf_value(inner, item) for item in items)
    return struct.pack(_FORMATS[kind], value)


def gguf_key(name: str, kind: int, value: Any) -> bytes:
    return gguf_string(name) + struct.pack("<I", kind) + gguf_value(kind, value)


def gguf_tensor(name: str, dims: Sequence[int], kind: int, offset: int) -> bytes:
    return (
        gguf_string(name)
        + struct.pack("<I", len(dims))
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


def gguf_bytes(
    keys: Sequence[Key] = (),
    tensors: Sequence[Tensor] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    head += b"".join(gguf_key(*key) for key in keys) + b"".join(gguf_tensor(*tensor) for tensor in tensors)
    return head + b"\0" * (-len(head) % alignment) + data


def gguf_model(keys: Sequence[Key], arrays: dict[str, np.ndarray], encoding: Encoding = Encoding.F32) -> bytes:
    """A truthful file: float arrays in NumPy's order (rows, columns), stored in F32 or F16."""
    tensors: list[Tensor] = []
    data = b""
    for name, array in arrays.items():
        tensors.append((name, array.shape[::-1], TENSOR_TYPES[encoding], len(data)))
        stored = array.astype(np.float16 if encoding is Encoding.F16 else np.float32).tobytes()
        assert len(stored) == array.size * BLOCKS[encoding].nbytes
        data += stored + b"\0" * (-len(stored) % 32)
    return gguf_bytes(keys, tensors, data)


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: Sequence[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


VOCABULARY: list[Key] = [
    ("tokenizer.ggml.model", STRING, "gpt2"),
    ("tokenizer.ggml.pre", STRING, "smollm"),
    ("tokenizer.ggml.tokens", ARRAY, (STRING, ["<|end|>", "a", "b", "ab"])),
    ("tokenizer.ggml.token_type", ARRAY, (INT32, [3, 1, 1, 1])),
    ("tokenizer.ggml.merges", ARRAY, (STRING, ["a b"])),
    ("tokenizer.ggml.eos_token_id", UINT32, 0),
]
