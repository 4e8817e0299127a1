"""The folder where fetched models are kept, and the habits of writing into it.

Owns its place (the environment variable MINSERVE_CACHE moves it) and how a file appears there: complete or not at all,
and written by one process at a time. It must not know where files come from.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from minserve.file_lock import FileLock

DownloadProgress = Callable[[str, int, int | None], None]  # what happens, bytes so far, bytes in all (None: unknown)

_CHUNK = 1 << 20
_POLL_S = 0.2


class DownloadError(Exception):
    """A model could not be fetched. The message says why, and what to do instead."""


def cache_dir() -> Path:
    """MINSERVE_CACHE, or this platform's folder for caches of the user. It may not exist yet."""
    moved = os.environ.get("MINSERVE_CACHE")
    if moved:
        return Path(moved).expanduser().absolute()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "minserve" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "minserve"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minserve"


def slug(name: str) -> str:
    """A file name that says which model it belongs to."""
    return re.sub(r"[^A-Za-z0-9._-]", "--", name)


@contextmanager
def locked(name: str, progress: DownloadProgress) -> Iterator[None]:
    """One process at a time fetches a model; the others wait, and then find it."""
    folder = cache_dir() / "locks"
    while (lock := _lock(folder, name)) is None:
        progress(f"waiting for another minserve that fetches {name}", 0, None)
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        lock.release()


def _lock(folder: Path, name: str) -> FileLock | None:
    """None if another process has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / (slug(name) + ".lock"))
    except BlockingIOError:
        return None
    except OSError as error:
        raise DownloadError(
            f"{folder} can't be written ({error.strerror}); set MINSERVE_CACHE to another place"
        ) from error


def sha256(source: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def need_space(folder: Path, nbytes: int) -> None:
    """DownloadError unless the disk of `folder` has room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise DownloadError(
            f"{folder} has {free / 1e6:.0f} MB free, but {nbytes / 1e6:.0f} MB are needed. "
            "Free some space, or set MINSERVE_CACHE to a folder on another disk."
        )


def publish(source: IO[bytes], target: Path, digest: str) -> None:
    """Copy a stream to a file that appears only when all of it is on the disk and its digest is right."""
    part = target.with_name(target.name + ".part")
    found = hashlib.sha256()
    try:
        with part.open("wb") as file:
            while chunk := source.read(_CHUNK):
                found.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if found.hexdigest() != digest:
            raise DownloadError(f"{target.name} is damaged: its SHA-256 is {found.hexdigest()}, not {digest}")
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    if sys.platform != "win32":  # make the rename itself last; Windows can't open folders
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def folder_size(folder: Path) -> int:
    """Bytes of all files below a folder, while others may be writing there."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            try:
                total += 0 if path.is_symlink() else path.stat().st_size
            except OSError:  # it was renamed in this moment
                continue
    return total


@contextmanager
def watched(folder: Path, what: str, total: int, progress: DownloadProgress) -> Iterator[None]:
    """Report the growth of a folder while a downloader that tells nothing works in it."""
    done = threading.Event()
    before = folder_size(folder)

    def report() -> None:
        while not done.wait(_POLL_S):
            progress(what, max(0, min(folder_size(folder) - before, total)), total)

    thread = threading.Thread(target=report, name="download progress", daemon=True)
    progress(what, 0, total)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    progress(what, total, total)
