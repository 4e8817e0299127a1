"""Free memory from small trees in place of /proc and /sys."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from minserve.backend.memory import available_memory, cgroup_headrooms

GIB = 1 << 30
linux = pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="/proc and cgroups are Linux's")


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable:   {20 * GIB // 1024} kB\n"}
OWN = "sys/fs/cgroup/a/b"


def v2(folder: str, limit: int | str, use: int, cache: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{use}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {cache}\nactive_file 7\n",
    }


def test_this_machine_has_some_memory() -> None:
    assert 1 << 20 < available_memory() < 1 << 50


@linux
def test_without_cgroups_it_is_what_the_kernel_says(tmp_path: Path) -> None:
    assert available_memory(tree(tmp_path, MEMINFO)) == 20 * GIB


@linux
def test_v2_takes_the_tightest_group_up_to_the_root(tmp_path: Path) -> None:
    files = MEMINFO | {"proc/self/cgroup": "0::/a/b\n"}
    files |= v2(OWN, "max", GIB) | v2("sys/fs/cgroup/a", 6 * GIB, 3 * GIB) | v2("sys/fs/cgroup", 9 * GIB, 4 * GIB)
    tree(tmp_path, files)
    assert sorted(cgroup_headrooms(tmp_path)) == [3 * GIB, 5 * GIB]
    assert available_memory(tmp_path) == 3 * GIB


@linux
def test_page_cache_that_can_be_dropped_is_not_use(tmp_path: Path) -> None:
    tree(tmp_path, MEMINFO | {"proc/self/cgroup": "0::/a/b\n"} | v2(OWN, 6 * GIB, 5 * GIB, cache=2 * GIB))
    assert available_memory(tmp_path) == 3 * GIB


@linux
def test_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    tree(tmp_path, MEMINFO | {"proc/self/cgroup": "0::/a/b\n"} | v2(OWN, GIB, 2 * GIB))
    assert available_memory(tmp_path) == 0


@linux
def test_path_of_the_host_falls_back_to_the_mount(tmp_path: Path) -> None:
    """A container without a cgroup namespace sees the host's path, and its own group at the mount."""
    tree(tmp_path, MEMINFO | {"proc/self/cgroup": "0::/../docker/1234\n"} | v2("sys/fs/cgroup", 4 * GIB, GIB))
    assert available_memory(tmp_path) == 3 * GIB


@linux
def test_v1_limits_count_and_its_no_limit_does_not(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "12:cpu,cpuacct:/x\n5:memory:/job\n1:name=systemd:/x\n",
        f"{group}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{group}/memory.usage_in_bytes": "12345\n",
        f"{group}/job/memory.limit_in_bytes": f"{8 * GIB}\n",
        f"{group}/job/memory.usage_in_bytes": f"{3 * GIB}\n",
        f"{group}/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
    }
    tree(tmp_path, MEMINFO | files)
    assert available_memory(tmp_path) == 6 * GIB


@linux
def test_unreadable_numbers_are_no_limit(tmp_path: Path) -> None:
    tree(tmp_path, MEMINFO | {"proc/self/cgroup": "0::/a/b\n"} | v2(OWN, "lots", GIB))
    assert available_memory(tmp_path) == 20 * GIB


def test_after_loading_large_allocations_have_pages_of_their_own_again() -> None:
    """Freed arrays raise glibc's threshold for that; left there, asyncio's read buffers shred the heap.

    In a process of its own: in this one's heap there may be room for anything.
    """
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("only glibc since 2.33 tells how its memory is made up")
    run = subprocess.run([sys.executable, "-c", PAGES], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True"]


PAGES = """
import ctypes
import numpy as np
from minserve.backend.memory import give_back

class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd a b c d e".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo2
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def has_pages_of_its_own(size):
    before = libc.mallinfo2().hblks
    address = libc.malloc(size)
    after = libc.mallinfo2().hblks
    libc.free(address)
    return after > before

np.ones(1 << 20)
print(has_pages_of_its_own(1 << 18))
give_back()
print(has_pages_of_its_own(1 << 18))
"""
