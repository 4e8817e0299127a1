"""Untrusted files: mapped read-only, and JSON read within bounds.

Owns nothing. Whatever is wrong with a file becomes a CheckpointError that names it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minserve.backend.base import CheckpointError

JSON_LIMIT = 64 * 1024 * 1024  # a large tokenizer.json has 35 MB


def map_file(path: Path) -> mmap.mmap:
    """The whole file, read-only. Pages come from disk when touched; arrays over it keep it open."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:  # mmap refuses empty files
        raise CheckpointError(f"{path.name}: the file is empty") from error
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror})") from error


def read_bytes(path: Path, limit: int = JSON_LIMIT) -> bytes:
    """A small file's content. CheckpointError if it is larger than `limit` bytes."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise CheckpointError(f"{path.name}: {size} bytes, more than the {limit} that such a file may have")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror})") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    return parse_json(read_bytes(path), path.name)


def parse_json(data: bytes, name: str) -> dict[str, Any]:
    """A JSON object in UTF-8. A repeated key is an error: which of the two values counts would be a guess."""

    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            keys = [key for key, _ in pairs]
            repeated = next(key for key in keys if keys.count(key) > 1)
            raise CheckpointError(f"{name}: the key {repeated!r} appears twice")
        return result

    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=no_repeats)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: not a JSON object")
    return value


def identity(paths: Sequence[Path], headers: Sequence[bytes]) -> bytes:
    """A digest of which weights these are: names, sizes, times of change and headers, not the (huge) content.

    Prefix-cache keys contain it, so KV rows never survive a change of the weights under the same name.
    """
    digest = hashlib.sha256()
    for path, header in zip(paths, headers, strict=True):
        stat = path.stat()
        for part in (path.name.encode(), b"%d %d" % (stat.st_size, stat.st_mtime_ns), header):
            digest.update(b"%d:" % len(part))
            digest.update(part)
    return digest.digest()
