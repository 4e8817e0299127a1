"""From CUDA C++ to a shared library for this CPU: `__shared__` declarations become macros of simt.h, g++ does the rest.

Owns the sources' rewriting, g++ and the cache of what it made, by content. It must not know how a kernel is launched.

The cache lies in the user's cache folder; MINSERVE_CACHE moves all of minserve's, MINSERVE_SIMT_CACHE this one.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

INCLUDE = Path(__file__).parent / "include"
CXX = os.environ.get("MINSERVE_SIMT_CXX", "g++")
CXXFLAGS = (
    *("-std=c++17", "-O1", "-g1", "-gdwarf-4", "-march=native", "-fPIC", "-fno-strict-aliasing"),
    # A thread's own variables: reading one before it's written doesn't compile; where g++ can't tell, it's poisoned.
    *("-Werror=uninitialized", "-Werror=maybe-uninitialized", "-ftrivial-auto-var-init=pattern"),
    "-ffp-contract=off",  # the same numbers on machines with and without fused multiply-add
    "-fstack-clash-protection",  # a stack overflow meets the guard page
    # Misaligned vector accesses and indices outside fixed-size arrays trap.
    *("-fsanitize=alignment,bounds,integer-divide-by-zero", "-fsanitize-undefined-trap-on-error"),
    # Loads and stores call what checks them in simt_shared.h.
    *("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"),
)
UNUSED_DAYS = 30  # cached libraries that nobody opened for so long are deleted


class CompilationError(RuntimeError):
    """g++ refuses a kernel: what it says."""


def missing() -> str | None:
    """Why the emulator can't run here, in one line, or None if it can."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"the CUDA emulator runs on Linux (x86-64, aarch64), not on {sys.platform} {platform.machine()}"
    if shutil.which(CXX) is None:
        return f"the CUDA emulator compiles kernels with {CXX}, which is not installed (apt install g++)"
    return None


def cache_folder() -> Path:
    """As minserve.weights.cache.cache_dir has it, which a bare machine can't import."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minserve"
    ours = Path(os.environ.get("MINSERVE_CACHE") or user) / "simt"
    return Path(os.environ.get("MINSERVE_SIMT_CACHE") or ours)


# ---- source ------------------------------------------------------------------
_ALIGN = r"(?:(?:__align__|alignas)\s*\(\s*\w+\s*\)\s*)?"
_DYNAMIC = re.compile(rf"extern\s+__shared__\s+{_ALIGN}([\w:<>, ]+?)\s+(\w+)\s*\[\s*\]\s*;")
_STATIC = re.compile(rf"__shared__\s+{_ALIGN}([\w:<>, ]+?)\s+(\w+)\s*((?:\[[^\]]+\]\s*)*);")
_KERNEL = re.compile(
    r"(template\s*<[^;{]*?>\s*)?(?:extern\s+\"C\"\s+)?__global__\s+([^({]*(?:\([^)]*\)[^({]*)?)\b(\w+)\s*\("
)


def rewrite_shared(source: str) -> str:
    source = _DYNAMIC.sub(r"SIMT_DYNAMIC_SHARED(\1, \2);", source)
    # The name comes last since the type and the sizes may hold commas.
    source = _STATIC.sub(lambda m: f"SIMT_SHARED(SIMT_TYPE({m[1]} {m[3].strip()}), {m[2]});", source)
    if "__shared__" in re.sub(r"//.*", "", source):
        raise ValueError("declare one __shared__ variable per statement: __shared__ T name[size];")
    return source


def plain_kernels(source: str) -> list[str]:
    """Names of the kernels that are not templates."""
    source = re.sub(r"//.*|/\*[\s\S]*?\*/", "", source)
    return [match[3] for match in _KERNEL.finditer(source) if match[1] is None]


# ---- compilation -------------------------------------------------------------
@functools.cache
def _machine() -> str:
    """What -march=native depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), platform.machine())


@functools.cache
def _headers() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(INCLUDE.iterdir()))


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process compiles, the others wait for its result."""
    import fcntl  # not on Windows, where nothing here runs

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_library(code: str, options: Sequence[str], names: Iterable[str]) -> Path:
    """The shared library with these kernels, from the cache or from g++. CompilationError with g++'s messages."""
    source = rewrite_shared(code)
    entries = ", ".join(f'SIMT_ENTRY("{name}", {name})' for name in names)
    unit = f'#include "simt.h"\n#line 1 "kernel.cu"\n{source}\nSIMT_MODULE({entries})\n'
    defines = [option for option in options if option.startswith(("-D", "-U"))]
    command = [CXX, *CXXFLAGS, *defines, f"-I{INCLUDE}"]
    key = hashlib.sha256(repr((unit, _headers(), CXXFLAGS, defines, CXX, _machine())).encode()).hexdigest()[:24]
    folder = cache_folder()
    library = folder / f"{key}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / f"{key}.lock"):
        if library.exists():
            os.utime(library)
        else:
            _compile(unit, command, folder, library)
            _prune(folder)
    return library


def _compile(unit: str, command: Sequence[str], folder: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path, made = Path(scratch) / "kernel.cpp", Path(scratch) / "kernel.o"
        path.write_text(unit)
        # Linked without -fsanitize=thread: simt_shared.h is the runtime.
        for step in (
            [*command, "-c", str(path), "-o", str(made)],
            [CXX, "-shared", str(made), "-o", f"{scratch}/kernel.so"],
        ):
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode:
                raise CompilationError(done.stderr[:8000])
        os.replace(f"{scratch}/kernel.so", library)


def _prune(folder: Path) -> None:
    oldest = time.time() - UNUSED_DAYS * 86400
    for path in folder.iterdir():
        try:
            if path.is_file() and path.stat().st_mtime < oldest:
                path.unlink()
        except FileNotFoundError:  # another process was faster
            continue
