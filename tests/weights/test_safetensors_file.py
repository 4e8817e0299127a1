"""The safetensors reader: the library's values, and every lie of a header refused before it costs memory."""

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from minserve.backend.base import CheckpointError
from minserve.backend.tensor import Encoding
from minserve.weights.safetensors_file import SafetensorsCheckpoint, SafetensorsFile
from tests.weights.build import bounded_memory, entry, safetensors_bytes

RNG = np.random.default_rng(1)


def written(folder: Path, content: bytes, name: str = "model.safetensors") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


# bug: 81
def test_all_float_types_of_one_file_read_as_the_library_wrote_them(tmp_path: Path) -> None:
    array = RNG.standard_normal((5, 7)).astype(np.float32)
    stored = {
        "f32": array,
        "f16": array.astype(np.float16),
        "bf16": array.astype(ml_dtypes.bfloat16),
        "norm": array[0],
    }
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    file = SafetensorsFile(tmp_path / "model.safetensors")
    assert sorted(file.names()) == sorted(stored)
    np.testing.assert_array_equal(file.tensor("f32").float32(), array)
    np.testing.assert_array_equal(file.tensor("f16").float32(), array.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(file.tensor("bf16").float32(), stored["bf16"].astype(np.float32))
    assert file.tensor("bf16").encoding is Encoding.BF16
    assert file.tensor("norm").shape == (7,)


def test_a_tensor_is_a_view_of_the_file(tmp_path: Path) -> None:
    size = 32 << 20
    path = tmp_path / "model.safetensors"
    with path.open("wb") as f:
        f.write(safetensors_bytes({"w": entry("F32", [1024, size // 4096], 0, size)}))
        f.truncate(f.tell() + size)
    with bounded_memory(1 << 20):
        tensor = SafetensorsFile(path).tensor("w")
        assert tensor.data[1023, -1] == 0
    assert not tensor.data.flags.writeable


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"[]", b"", "invalid JSON in header"),
        (b"  {}", b"", "does not begin with {"),
        (b'{"a":', b"", "invalid JSON in header"),
        (b'{"a":' * 5000 + b"{}" + b"}" * 5000, b"", "recursion limit exceeded"),
        (b"{" + b"\xff" * 8 + b"}", b"", "invalid UTF-8"),
        (b'{"w":%s,"w":%s}' % ((json.dumps(entry("F32", [1], 0, 4)).encode(),) * 2), b"1234", "appears twice"),
        (b'{"w":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"1234", "duplicate field"),
        ({"w": entry("F32", [1], 4, 0)}, b"1234", "invalid offset for tensor `w`"),
        ({"w": entry("F32", [1], -4, 0)}, b"1234", "integer `-4`"),
        ({"w": entry("F32", [1], 0, 8)}, b"12345678", "invalid shape, data type, or offset"),
        ({"w": entry("F32", [2], 0, 4)}, b"1234", "invalid shape, data type, or offset"),
        ({"w": entry("F32", [-1], 0, 4)}, b"1234", "integer `-1`"),
        ({"w": entry("F32", [-1, -1], 0, 4)}, b"1234", "integer `-1`"),
        ({"w": entry("F32", [1 << 32, 1 << 32], 0, 0)}, b"", "overflow"),
        ({"w": entry("F32", [1 << 62, 4], 0, 0)}, b"", "overflow"),
        ({"w": entry("F32", [1 << 64], 0, 4)}, b"1234", "expected usize"),
        ({"w": entry("F32", [1.0], 0, 4)}, b"1234", "expected usize"),  # type: ignore[list-item]
        ({"w": entry("F32", [True], 0, 4)}, b"1234", "expected usize"),
        ({"w": entry("F31", [1], 0, 4)}, b"1234", "unknown variant `F31`"),
        ({"w": entry(7, [1], 0, 4)}, b"1234", "invalid type: integer `7`"),  # type: ignore[arg-type]
        ({"w": {"dtype": "F32", "shape": [1]}}, b"1234", "missing field"),
        ({"w": [1]}, b"1234", "invalid type"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 2, 6)}, b"123456", "invalid offset for tensor"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, b"1234", "invalid offset for tensor"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, b"123456789012", "invalid offset for tensor"),
        ({"a": entry("F32", [1], 4, 8)}, b"12345678", "invalid offset for tensor"),
        ({"a": entry("F32", [1], 0, 4)}, b"12345678", "file not fully covered"),
        ({"a": entry("F32", [2], 0, 8)}, b"1234", "file not fully covered"),
        ({"__metadata__": [], "a": entry("F32", [1], 0, 4)}, b"1234", "invalid type"),
        ({"__metadata__": {"a": 1}, "a": entry("F32", [1], 0, 4)}, b"1234", "invalid type"),
    ],
)
# bug: 78
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    path = written(tmp_path, safetensors_bytes(header, data))
    with bounded_memory(), pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFile(path)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize("length", [0, 1, 1 << 63, (1 << 64) - 1, 100_000_001, 3])
# bug: 78
def test_a_header_length_that_lies_is_refused(tmp_path: Path, length: int) -> None:
    path = written(tmp_path, struct.pack("<Q", length) + b"{}")
    with bounded_memory(), pytest.raises(CheckpointError, match="header"):
        SafetensorsFile(path)


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(CheckpointError):
        SafetensorsFile(written(tmp_path, content))


def test_types_and_shapes_that_no_weight_has_are_refused_when_asked_for(tmp_path: Path) -> None:
    header = {
        "ids": entry("I64", [1], 0, 8),
        "scalar": entry("F32", [], 8, 12),
        "cube": entry("F32", [1, 1, 1], 12, 16),
    }
    file = SafetensorsFile(written(tmp_path, safetensors_bytes(header, b"1234567890123456")))
    for name, message in (
        ("ids", "stored as I64"),
        ("scalar", "0 dimensions"),
        ("cube", "3 dimensions"),
        ("x", "no tensor"),
    ):
        with pytest.raises(CheckpointError, match=message):
            file.tensor(name)


def test_empty_tensors_take_no_place(tmp_path: Path) -> None:
    header = {"a": entry("F32", [0, 4], 0, 0), "b": entry("F32", [1], 0, 4)}
    file = SafetensorsFile(written(tmp_path, safetensors_bytes(header, b"1234")))
    assert file.tensor("a").float32().shape == (0, 4)


def one(value: float) -> bytes:
    return safetensors_bytes({f"w{value}": entry("F32", [1], 0, 4)}, struct.pack("<f", value))


def index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    written(tmp_path, one(1), "a.safetensors")
    written(tmp_path, one(2), "b.safetensors")
    index(tmp_path, {"w1": "a.safetensors", "w2": "b.safetensors"})
    checkpoint = SafetensorsCheckpoint(tmp_path, {})
    assert list(checkpoint.names()) == ["w1", "w2"]
    assert checkpoint.tensor("w2").float32()[0] == 2
    with pytest.raises(CheckpointError, match="no tensor 'w3'"):
        checkpoint.tensor("w3")


@pytest.mark.parametrize(
    "shard",
    ["../a.safetensors", "/etc/a.safetensors", "..\\a.safetensors", "C:a.safetensors", "sub/a.safetensors", "a.bin", 7],
)
# bug: 78
def test_an_index_names_only_files_of_its_folder(tmp_path: Path, shard: Any) -> None:
    written(tmp_path.parent, one(1), "a.safetensors")
    index(tmp_path, {"w1": shard})
    with pytest.raises(CheckpointError, match="not the name of a"):
        SafetensorsCheckpoint(tmp_path, {})


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    written(tmp_path, one(1), "a.safetensors")
    index(tmp_path, {"w1": "a.safetensors", "w2": "a.safetensors"})
    with pytest.raises(CheckpointError, match="'w2', but it doesn't"):
        SafetensorsCheckpoint(tmp_path, {})
    index(tmp_path, {"w1": "a.safetensors", "w2": "b.safetensors"})
    with pytest.raises(CheckpointError, match=r"lacks 1 shard\(s\).*b\.safetensors"):
        SafetensorsCheckpoint(tmp_path, {})
    index(tmp_path, [])
    with pytest.raises(CheckpointError, match="no weight_map"):
        SafetensorsCheckpoint(tmp_path, {})


VALID = safetensors_bytes(
    {"__metadata__": {"format": "pt"}, "a": entry("F32", [2, 2], 0, 16), "b": entry("BF16", [3], 16, 22)}, bytes(22)
)


@settings(max_examples=300)
@given(
    edits=st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=6),
    cut=st.integers(0, len(VALID)),
    swap=st.sampled_from(
        [(b"16", b"99999999999999999999"), (b"F32", b"F64"), (b"2, 2", b"0, 9"), (b"22", b"-2"), (b"x", b"x")]
    ),
)
# bug: 78
def test_any_damage_is_a_clear_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]], cut: int, swap: tuple[bytes, bytes]
) -> None:
    data = bytearray(VALID.replace(*swap))
    for at, byte in edits:
        data[at] = byte
    path = written(tmp_path_factory.getbasetemp(), bytes(data[: max(cut, len(data) - 40)]), "fuzz.safetensors")
    with bounded_memory():
        try:
            file = SafetensorsFile(path)
            for name in file.names():
                file.tensor(name).float32()
        except CheckpointError:
            pass
