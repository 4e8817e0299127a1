"""Packed weights on disk: found again, never trusted blindly, never in the way."""

from __future__ import annotations

import mmap
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from minserve.backend.numba_backend import NumbaBackend, store
from minserve.backend.numba_backend.arena import PAGE
from minserve.backend.numba_backend.packing import VERSION
from minserve.backend.numba_backend.store import PackedStore, pages, prune, read, write
from minserve.backend.tensor import HostTensor


@pytest.fixture(autouse=True)
def small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "SMALLEST", 100)


def entries() -> dict[str, np.ndarray]:
    return {"a": np.arange(200, dtype=np.uint8), "b | c": np.full(333, 7, np.uint8)}


def test_what_is_written_is_read_aligned(tmp_path: Path) -> None:
    write(tmp_path / "x.bin", entries())
    found = read(tmp_path / "x.bin")
    assert list(found) == ["a", "b | c"]
    for key, data in entries().items():
        np.testing.assert_array_equal(found[key], data)
        assert found[key].ctypes.data % 128 == 0
    assert [p.name for p in tmp_path.iterdir()] == ["x.bin"]


@pytest.mark.parametrize("damage", ["short", "long", "magic", "header", "offset", "huge header", "empty"])
def test_a_damaged_file_is_ignored(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.bin"
    write(path, entries())
    raw = path.read_bytes()
    changed = {
        "short": raw[:-1],
        "long": raw + b"\0",
        "magic": b"M" + raw[1:],
        "header": raw[:24] + b"!" + raw[25:],
        "offset": raw.replace(b'"a": [0', b'"a": [9'),
        "huge header": raw[:8] + struct.pack("<Q", 1 << 60) + raw[16:],
        "empty": b"",
    }[damage]
    path.write_bytes(changed)
    assert read(path) == {}
    assert read(tmp_path / "missing.bin") == {}


@pytest.mark.parametrize("huge", [True, False])
def test_a_file_is_mapped_or_where_that_gives_small_pages_alone_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, huge: bool
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(store, "in_huge_pages", lambda data: huge)
    write(tmp_path / "x.bin", entries())
    found = read(tmp_path / "x.bin")
    for key, data in entries().items():
        np.testing.assert_array_equal(found[key], data)
        assert found[key].flags.writeable is not huge  # a mapping is never written to
        assert found[key].ctypes.data % 128 == 0


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_what_was_never_mapped_from_a_file_is_not_in_its_huge_pages(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(5000))
    with (tmp_path / "x").open("rb") as file:
        small = np.frombuffer(mmap.mmap(file.fileno(), 5000, access=mmap.ACCESS_READ), np.uint8)
    assert not store.in_huge_pages(small)
    assert not store.in_huge_pages(np.zeros(100, np.uint8))


@pytest.mark.parametrize("sizes", [[0], [5], [PAGE], [3, PAGE - 1, 2], [7, 2 * PAGE + 9, 1]])
def test_what_is_written_comes_in_whole_pages(sizes: list[int]) -> None:
    pieces = [np.random.default_rng(i).bytes(size) for i, size in enumerate(sizes)]
    cut = list(pages(pieces))
    assert b"".join(cut) == b"".join(pieces)
    assert {len(page) for page in cut[:-1]} <= {PAGE}
    assert len(cut[-1]) < PAGE


def test_an_offset_beyond_the_file_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    write(path, entries())
    path.write_bytes(path.read_bytes().replace(b"[0, 200]", b"[9, 999]"))
    assert read(path) == {}


def test_little_is_not_worth_a_file(tmp_path: Path) -> None:
    small = PackedStore("model")
    small.add("a", np.zeros(99, np.uint8))
    small.save()
    nameless = PackedStore("")
    nameless.add("a", np.zeros(1000, np.uint8))
    nameless.save()
    assert not (tmp_path / "packed").exists()


def test_an_entry_of_another_size_is_packed_anew() -> None:
    first = PackedStore("model")
    first.add("a", np.ones(500, np.uint8))
    first.save()
    second = PackedStore("model")
    assert second.get("a", 500) is not None
    assert second.get("a", 499) is None
    assert second.get("b", 500) is None


def test_the_least_recently_used_files_go_and_those_of_other_versions(tmp_path: Path) -> None:

    for i in range(6):
        path = tmp_path / f"m{i}-{VERSION}.bin"
        path.write_bytes(b"")
        os.utime(path, (1000 + i, 1000 + i))
    (tmp_path / "m0-0.bin").write_bytes(b"")
    prune(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"m{i}-{VERSION}.bin" for i in range(2, 6)]


def test_a_second_start_takes_the_packed_weights_without_reading_the_tensors() -> None:
    rng = np.random.default_rng(0)
    tensors = [HostTensor.from_array(name, rng.standard_normal((64, 64)).astype(np.float32)) for name in "ab"]
    first = NumbaBackend(weights_id=b"id", quantize="q8")
    packed = [first.prepare_linear(tensors), first.prepare_linear(tensors, pairs=True)]
    first._store.save()
    unread = [HostTensor(t.name, t.shape, t.encoding, np.empty((0, 0), np.uint8)) for t in tensors]
    second = NumbaBackend(weights_id=b"id", quantize="q8")
    again = [second.prepare_linear(unread), second.prepare_linear(unread, pairs=True)]
    for a, b in zip(packed, again, strict=True):
        np.testing.assert_array_equal(a.segments[0].data, b.segments[0].data)
    other = NumbaBackend(weights_id=b"id", quantize="q4")
    with pytest.raises(ValueError, match="reshape"):
        other.prepare_linear(unread)
