"""Packed weights on disk, so that a second start reads them instead of packing them again.

Owns one file per model, packing version and requantization in the cache folder, and nothing else of it. It must not
know formats. A file appears complete or not at all and never changes; a damaged or foreign one is ignored and written
anew. It is mapped, so that servers of one model share it. Huge pages matter, since each token reads all weights: where
the system maps files in small ones alone, as Linux does on most file systems, it is read into memory instead.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import struct
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from minserve.backend.numba_backend.arena import PAGE, Bytes, aligned
from minserve.backend.numba_backend.jit import cache_folder
from minserve.backend.numba_backend.layout import LINE
from minserve.backend.numba_backend.packing import VERSION

MAGIC = b"minserve"
SMALLEST = 32 << 20  # bytes of weights below which packing again is quick enough
MOST_HEADER = 16 << 20
POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14
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
    header += b" " * (-(len(MAGIC) + 16 + len(header)) % LINE)
    pieces: list[bytes | memoryview] = [MAGIC + struct.pack("<QQ", len(header), at) + header]
    for data in entries.values():
        pieces += [data.data, bytes(-data.nbytes % LINE)]
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("wb", buffering=PAGE) as file:
            for page in pages(pieces):
                file.write(page)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def pages(pieces: Iterable[bytes | memoryview]) -> Iterator[bytearray]:
    """The pieces, one after the other, cut as huge pages are: what is written at once can be one in the page cache."""
    page = bytearray()
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            left = PAGE - len(page)
            page += rest[:left]
            rest = rest[left:]
            if len(page) == PAGE:
                yield page
                page = bytearray()
    yield page


def read(path: Path) -> dict[str, Bytes]:
    """The entries of a file, one array; none if it is missing or isn't what `write` makes."""
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC) + 16)
            size = path.stat().st_size
            if len(start) < len(MAGIC) + 16 or start[: len(MAGIC)] != MAGIC:
                return {}
            length, total = struct.unpack("<QQ", start[len(MAGIC) :])
            at = len(start) + length
            if length > MOST_HEADER or at + total != size or at % LINE:
                return {}
            index = json.loads(file.read(length))
            if not all(0 <= at <= at + n <= total and at % LINE == 0 for at, n in index.values()):
                return {}
            data = mapped(file, size)[at:]
        os.utime(path)
    except (OSError, ValueError, AttributeError, TypeError, MemoryError):
        return {}
    return {key: data[at : at + n] for key, (at, n) in index.items()}


def mapped(file: BinaryIO, size: int) -> Bytes:
    """A whole file, mapped; read into memory where that alone gives huge pages."""
    memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    with contextlib.suppress(AttributeError, OSError):  # elsewhere, and on older Linux, pages come as they are used
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(POPULATE_READ)
    data = np.frombuffer(memory, np.uint8)
    if sys.platform != "linux" or in_huge_pages(data):
        return data
    copy = aligned(size, PAGE)
    copy[:] = data
    return copy


def in_huge_pages(data: Bytes) -> bool:
    """Whether most of a mapping of its own is, by what Linux says of this process's mappings."""
    mine = False
    with contextlib.suppress(OSError), open("/proc/self/smaps") as mappings:  # not everywhere is there a /proc
        for line in mappings:
            if line.startswith(f"{data.ctypes.data:08x}-"):
                mine = True
            elif mine and line.startswith("FilePmdMapped:"):
                return int(line.split()[1]) * 1024 > data.nbytes // 2
    return False


def prune(folder: Path) -> None:
    """Keep the FILES most recently used, of this version of the packing alone."""
    current = sorted(folder.glob(f"*-{VERSION}.bin"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in {*folder.glob("*.bin")} - {*current[:FILES]}:
        path.unlink(missing_ok=True)
