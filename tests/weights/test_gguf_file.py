"""The GGUF container: the same content as the gguf package reads, and every lie refused before it costs memory."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve.backend.base import CheckpointError
from minserve.backend.tensor import BLOCKS, Encoding
from minserve.weights.gguf_file import read_gguf
from tests.weights.build import (
    ARRAY,
    FLOAT32,
    INT32,
    STRING,
    UINT8,
    UINT32,
    UINT64,
    VOCABULARY,
    bounded_memory,
    gguf_bytes,
    gguf_key,
    gguf_string,
    gguf_tensor,
)

RNG = np.random.default_rng(2)


def written(folder: Path, content: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return path


def head(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def test_metadata_and_tensors_read_as_the_gguf_package_wrote_them(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("n", 7)
    writer.add_int64("long", -(2**40))
    writer.add_float32("f", 0.5)
    writer.add_bool("yes", True)
    writer.add_string("s", "čau")
    writer.add_array("words", ["a", "", "ř"])
    writer.add_array("numbers", [1, -2, 3])
    arrays = {"w": RNG.standard_normal((6, 64)).astype(np.float32), "v": RNG.standard_normal(5).astype(np.float32)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.add_tensor("h", arrays["w"].astype(np.float16))
    quantized = gguf.quantize(arrays["w"], gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = read_gguf(path)
    m = file.metadata
    assert (m["n"], m["long"], m["f"], m["yes"], m["s"], m["words"]) == (7, -(2**40), 0.5, True, "čau", ["a", "", "ř"])
    np.testing.assert_array_equal(m["numbers"], [1, -2, 3])
    for name, array in arrays.items():
        np.testing.assert_array_equal(file.tensors[name].float32(), array)
    np.testing.assert_array_equal(file.tensors["h"].float32(), arrays["w"].astype(np.float16))
    expected = gguf.dequantize(quantized, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_allclose(file.tensors["q"].float32(), expected, rtol=2e-7)
    assert file.tensors["q"].encoding is Encoding.Q8_0
    assert not file.tensors["w"].data.flags.writeable


def test_version_2_and_another_alignment_are_read(tmp_path: Path) -> None:
    data = bytes(64) + np.array([3], np.float32).tobytes()
    keys = [("general.alignment", UINT32, 64)]
    tensors = [("a", [1], 0, 0), ("b", [1], 0, 64)]
    file = read_gguf(written(tmp_path, gguf_bytes(keys, tensors, data, version=2, alignment=64)))
    assert file.tensors["b"].float32() == [3]


ONE = [("w", [32], 0, 0)]
F32_ONE = bytes(128)
HUGE = (1 << 63, (1 << 64) - 1, 10**6)
HEADERS: list[tuple[Any, bytes, str]] = [
    ("empty", b"", "empty"),
    ("short", b"GGUF\3", "left"),
    ("magic", b"GGML" + bytes(40), "not a GGUF file"),
    ("version 1", head(version=1), "version 1"),
    ("version 4", head(version=4), "version 4"),
    ("big-endian", b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    *[(f"{n} tensors", head(tensors=n) + bytes(100), "tensors at byte") for n in HUGE],
    *[(f"{n} keys", head(keys=n) + bytes(100), "metadata keys at byte") for n in HUGE],
    *[(f"key of {n}", head(keys=1) + struct.pack("<Q", n) + bytes(30), "string of") for n in HUGE],
    *[
        (f"string of {n}", head(keys=1) + gguf_string("k") + struct.pack("<IQ", STRING, n) + bytes(9), "string of")
        for n in HUGE
    ],
    *[
        (
            f"{n} strings",
            head(keys=1) + gguf_string("k") + struct.pack("<IIQ", ARRAY, STRING, n) + bytes(99),
            "strings at",
        )
        for n in HUGE
    ],
    *[
        (
            f"{n} numbers",
            head(keys=1) + gguf_string("k") + struct.pack("<IIQ", ARRAY, UINT64, n) + bytes(99),
            "values of",
        )
        for n in HUGE
    ],
    (
        "strings past the end",
        head(keys=1) + gguf_string("k") + struct.pack("<IIQQ", ARRAY, STRING, 2, 8) + bytes(9),
        "cut off",
    ),
    ("not UTF-8", head(keys=1) + struct.pack("<Q", 5) + b"\xff" * 5 + bytes(30), "not UTF-8"),
    (
        "nested arrays",
        head(keys=1) + gguf_string("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1) + bytes(99),
        "arrays in an array",
    ),
    ("type 13", head(keys=1) + gguf_string("k") + struct.pack("<I", 13) + bytes(99), "unknown type 13"),
    (
        "array of type 99",
        head(keys=1) + gguf_string("k") + struct.pack("<IIQ", ARRAY, 99, 1) + bytes(99),
        "unknown type 99",
    ),
    ("key twice", head(keys=2) + gguf_key("k", UINT8, 1) * 2, "appears twice"),
    ("alignment 0", gguf_bytes([("general.alignment", UINT32, 0)], ONE, F32_ONE), "power of two"),
    ("alignment 24", gguf_bytes([("general.alignment", UINT32, 24)], ONE, F32_ONE), "power of two"),
    ("alignment 2**30", gguf_bytes([("general.alignment", UINT32, 1 << 30)], ONE, F32_ONE), "past the end of the file"),
    ("alignment text", gguf_bytes([("general.alignment", STRING, "32")], ONE, F32_ONE), "power of two"),
    ("alignment u64", gguf_bytes([("general.alignment", UINT64, 32)], ONE, F32_ONE), "power of two"),
    ("alignment array", gguf_bytes([("general.alignment", ARRAY, (UINT32, [32]))], ONE, F32_ONE), "power of two"),
    ("0 dimensions", head(tensors=1) + gguf_tensor("w", [], 0, 0) + bytes(64), "has 0 dimensions"),
    ("5 dimensions", gguf_bytes(tensors=[("w", [1] * 5, 0, 0)], data=F32_ONE), "has 5 dimensions"),
    (
        "10**6 dimensions",
        head(tensors=1) + gguf_string("w") + struct.pack("<I", 10**6) + bytes(64),
        "has 1000000 dimensions",
    ),
    ("product wraps to 0", gguf_bytes(tensors=[("w", [1 << 32, 1 << 32], 0, 0)], data=F32_ONE), "past the end"),
    ("product wraps", gguf_bytes(tensors=[("w", [(1 << 62) + 32, 4], 0, 0)], data=F32_ONE), "past the end"),
    ("too long", gguf_bytes(tensors=[("w", [33], 0, 0)], data=F32_ONE), "ends 4 bytes past the end"),
    ("offset past the end", gguf_bytes(tensors=[("w", [32], 0, 1 << 62)], data=F32_ONE), "past the end"),
    ("offset 2**64 - 32", gguf_bytes(tensors=[("w", [32], 0, (1 << 64) - 32)], data=F32_ONE), "past the end"),
    ("offset not aligned", gguf_bytes(tensors=[("w", [1], 0, 4)], data=F32_ONE), "not a multiple of 32"),
    ("overlap", gguf_bytes(tensors=[("a", [32], 0, 0), ("b", [8], 0, 32)], data=F32_ONE), "overlaps"),
    ("tensor twice", gguf_bytes(tensors=[("a", [8], 0, 0), ("a", [8], 0, 32)], data=F32_ONE), "appears twice"),
    ("half a block", gguf_bytes(tensors=[("w", [16], 8, 0)], data=F32_ONE), "multiple of 32"),
    ("unreadable type", gguf_bytes(tensors=[("w", [256], 10, 0)], data=F32_ONE), "stored as Q2_K"),
    ("no such type", gguf_bytes(tensors=[("w", [32], 1000, 0)], data=F32_ONE), "stored as type 1000"),
]


@pytest.mark.parametrize(("content", "message"), [pytest.param(c, m, id=name) for name, c, m in HEADERS])
# bug: 79
def test_a_file_that_lies_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = written(tmp_path, content)
    with bounded_memory(1 << 20), pytest.raises(CheckpointError, match=message) as caught:
        read_gguf(path)
    assert "model.gguf" in str(caught.value)


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="can't be read"):
        read_gguf(tmp_path / "none.gguf")


@pytest.mark.parametrize("encoding", list(Encoding))
def test_every_encoding_has_its_size(tmp_path: Path, encoding: Encoding) -> None:
    kind = int(gguf.GGMLQuantizationType[encoding.value])
    block = BLOCKS[encoding]
    data = bytes(3 * 256 // block.weights * block.nbytes)
    file = read_gguf(written(tmp_path, gguf_bytes(tensors=[("w", [256, 3], kind, 0)], data=data)))
    assert file.tensors["w"].shape == (3, 256)
    assert file.tensors["w"].data.shape == (3, 256 // block.weights * block.nbytes)
    with pytest.raises(CheckpointError, match="past the end"):
        read_gguf(written(tmp_path, gguf_bytes(tensors=[("w", [256, 3], kind, 0)], data=data[:-1])))


VALID = gguf_bytes(
    [*VOCABULARY, ("x", FLOAT32, 1.0), ("y", ARRAY, (INT32, [1, 2]))],
    [("a", [32, 2], 8, 0), ("b", [4], 0, 96)],
    bytes(96 + 16),
)


@settings(max_examples=300)
@given(
    edits=st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=6),
    wide=st.none()
    | st.tuples(st.integers(0, len(VALID) - 8), st.sampled_from([0, 1 << 63, (1 << 64) - 1, 1 << 32, 1 << 20])),
    cut=st.integers(0, len(VALID)),
)
# bug: 79
def test_any_damage_is_a_clear_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]], wide: tuple[int, int] | None, cut: int
) -> None:
    data = bytearray(VALID)
    for at, byte in edits:
        data[at] = byte
    if wide is not None:
        data[wide[0] : wide[0] + 8] = struct.pack("<Q", wide[1])
    path = written(tmp_path_factory.getbasetemp(), bytes(data[: max(cut, len(data) - 120)]))
    with bounded_memory():
        try:
            for tensor in read_gguf(path).tensors.values():
                tensor.data.sum()
        except CheckpointError:
            pass
