"""This host's memory: how much is free, by the operating system and the cgroups, and giving back what is unused.

Owns no state; standard library only. A container's limit is often far below the machine's memory, and going over it
ends the process without a word, so the smaller of the two counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from pathlib import Path

_M_MMAP_THRESHOLD = -3  # malloc.h
UNKNOWN = 1 << 30  # what we dare to assume where no source answers


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process could allocate without swapping or meeting its cgroup's limit.

    root: where /proc and /sys are looked for (tests put a small tree there).
    """
    if sys.platform == "win32":
        return _windows() or UNKNOWN
    if sys.platform == "darwin":
        return _macos() or UNKNOWN
    host = _meminfo(root / "proc/meminfo") or _sysconf() or UNKNOWN
    return max(0, min([host, *cgroup_headrooms(root)]))


def give_back() -> None:
    """Return to the operating system what loading a model needed and freed: the C library would keep it.

    And serve large allocations from pages of their own again, as before loading. glibc raises the size from which it
    does so to that of the largest array that was freed (mallopt(3)). From then on the 256 KiB that asyncio allocates
    for each read, and shrinks to what came, leave a hole in the heap beside every request body that lives on: a
    server's memory grew by 170 bytes a request, and never stopped.
    """
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # only glibc can
            libc = ctypes.CDLL(None)
            libc.mallopt(_M_MMAP_THRESHOLD, 256 * 1024)
            libc.malloc_trim(0)


def _meminfo(path: Path) -> int | None:
    """MemAvailable (Linux 3.14): free memory plus page cache and slabs that can be dropped."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _sysconf() -> int | None:
    if sys.platform == "win32":
        return None
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def cgroup_headrooms(root: Path = Path("/")) -> list[int]:
    """Limit minus use of every memory cgroup above this process that has a limit (v2, v1 or both).

    A limit holds for the whole subtree, so each ancestor counts. Use includes page cache; its inactive file part is
    taken off, the kernel drops it before it refuses memory.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:  # hierarchy-ID:controllers:path; v2 has the ID 0 and no controllers
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mounts = [root / "sys/fs/cgroup/memory"]
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        for mount in mounts:
            found += [room for group in _ancestors(mount, path) if (room := _headroom(group, *names)) is not None]
    return found


def _ancestors(mount: Path, path: str) -> list[Path]:
    """The group's folder and those above it, up to the mount. In a container without a cgroup namespace the path is
    the host's and doesn't exist here; the mount is the container's own group then."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _headroom(group: Path, limit_file: str, use_file: str, cache_key: str) -> int | None:
    try:
        limit = (group / limit_file).read_text().strip()
        use = int((group / use_file).read_text())
    except (OSError, ValueError):
        return None
    if not limit.isdigit() or int(limit) >= 1 << 60:  # "max", or v1's way to say so
        return None
    return int(limit) - use + _statistic(group / "memory.stat", cache_key)


def _statistic(path: Path, key: str) -> int:
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == key), 0)


def _windows() -> int | None:
    """GlobalMemoryStatusEx: ullAvailPhys, the fourth field of MEMORYSTATUSEX."""
    if sys.platform != "win32":
        return None

    class MemoryStatus(ctypes.Structure):
        _fields_ = (
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            *((name, ctypes.c_ulonglong) for name in ("total", "available", *"abcde")),
        )

    status = MemoryStatus()
    status.length = ctypes.sizeof(status)
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None
    return int(status.available)


def _macos() -> int | None:
    """host_statistics64(HOST_VM_INFO64): free and inactive pages, the first and third of its 32-bit counters."""
    if sys.platform != "darwin":
        return None
    try:
        libc = ctypes.CDLL(None)
        libc.mach_host_self.restype = ctypes.c_uint
        counters, count = (ctypes.c_uint * 64)(), ctypes.c_uint(38)
        if libc.host_statistics64(libc.mach_host_self(), 4, counters, ctypes.byref(count)) != 0:
            return None
        return (counters[0] + counters[2]) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError):
        return None
