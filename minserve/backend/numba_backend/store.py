"""Packed weights on disk, so that a second start reads them instead of packing them again.

Owns one file per model, packing version and requantization in the cache folder, and nothing else of it. It must not
know formats. A file appears complete or not at all; a damaged or foreign one is ignored and written anew. It is read
into memory rather than mapped: as fast as the page cache gives it, once, and then in huge pages, which decoding one
stream gains a few per cent from.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import threading
import uuid
from pathlib import Path

from minserve.backend.numba_backend.arena import PAGE, Bytes, aligned
from minserve.backend.numba_backend.jit import cache_folder
from minserve.backend.numba_backend.layout import LINE
from minserve.backend.numba_backend.packing import VERSION

MAGIC = b"minserve"
SMALLEST = 32 << 20  # bytes of weights below which packing again is quick enough
MOST_HEADER = 16 << 20
FILES = 4  # kept; the least recently used go


class PackedStore:
    """Entries by key. name: of the file, which must differ whenever packed weights would; empty: nothing is stored.

    The file is read on a thread from the start on, beside whatever the caller does before it asks for an entry.
    """

    def __init__(self, name: str) -> None:
        self._path = cache_folder() / "packed" / f"{name}-{VERSION}.bin" if name else None
        self._stored: dict[str, Bytes] = {}
        self._fresh: dict[str, Bytes] = {}
        self._reading: threading.Thread | None = None
        if self._path is not None:
            self._reading = threading.Thread(
                target=self._read, args=(self._path,), name="minserve-weights", daemon=True
            )
            self._reading.start()

    def _read(self, path: Path) -> None:
        self._stored = read(path)

    def get(self, key: str, nbytes: int) -> Bytes | None:
        if self._reading is not None:
            self._reading.join()
        data = self._stored.get(key)
        return data if data is not None and len(data) == nbytes else None

    def add(self, key: str, data: Bytes) -> None:
        self._fresh[key] = data

    def save(self) -> None:
        """Write what was added since, unless it is little or the disk is nearly full. Failing to is no error."""
        total = sum(data.nbytes for data in self._fresh.values())
        if self._path is None or total < SMALLEST:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self._path.parent).free > 2 * total:
                write(self._path, self._fresh)
                prune(self._path.parent)
        self._fresh = {}


def write(path: Path, entries: dict[str, Bytes]) -> None:
    """MAGIC, length of the header, the header (JSON: key -> [offset, bytes]), then the data, each piece aligned."""
    index, at = {}, 0
    for key, data in entries.items():
        index[key] = [at, data.nbytes]
        at += -(-data.nbytes // LINE) * LINE
    header = json.dumps(index).encode()
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("wb") as file:
            file.write(MAGIC + struct.pack("<QQ", len(header), at) + header)
            for data in entries.values():
                file.write(data.data)
                file.write(bytes(-data.nbytes % LINE))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Bytes]:
    """The entries of a file, in one allocation; none if it is missing or isn't what `write` makes."""
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC) + 16)
            size = path.stat().st_size
            if len(start) < len(MAGIC) + 16 or start[: len(MAGIC)] != MAGIC:
                return {}
            length, total = struct.unpack("<QQ", start[len(MAGIC) :])
            if length > MOST_HEADER or len(start) + length + total != size:
                return {}
            index = json.loads(file.read(length))
            if not all(0 <= at <= at + n <= total for at, n in index.values()):
                return {}
            data = aligned(total, PAGE)
            if file.readinto(memoryview(data)) != total:  # type: ignore[arg-type]
                return {}
        os.utime(path)
    except (OSError, ValueError, AttributeError, TypeError, MemoryError):
        return {}
    return {key: data[at : at + n] for key, (at, n) in index.items()}


def prune(folder: Path) -> None:
    """Keep the FILES most recently used, of this version of the packing alone."""
    current = sorted(folder.glob(f"*-{VERSION}.bin"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in {*folder.glob("*.bin")} - {*current[:FILES]}:
        path.unlink(missing_ok=True)
