"""SimRawModule: the interface of cupy.RawModule, with kernels that run on the CPU.

Owns the way from CUDA C++ to a callable: `__shared__` declarations become macros of simt.h, g++ compiles the result
into a shared library that is cached by content, ctypes calls it. It must not know CuPy's arrays (fakecupy.py) nor any
particular kernel.

The cache lies in the user's cache folder; MINSERVE_CACHE moves all of minserve's, MINSERVE_SIMT_CACHE this one.
MINSERVE_SIMT_ORDER=forward|reverse|shuffle and MINSERVE_SIMT_SEED choose the schedule.
"""

from __future__ import annotations

import ctypes
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tests.simt import device_memory

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
ORDERS = {"forward": 0, "reverse": 1, "shuffle": 2}
SHARED_LIMIT = 99 * 1024  # opt-in maximum of consumer GPUs, in bytes a block; A100: 163 KiB, H100: 227 KiB
STATIC_LIMIT = 47 * 1024  # 48 KiB without opting in, less what a kernel declares itself
MAX_THREADS, MAX_GRID_YZ = 1024, 65535
UNUSED_DAYS = 30  # cached libraries that nobody opened for so long are deleted


class KernelError(RuntimeError):
    """A kernel did something that is an error, or undefined, on a GPU."""


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


# Source -> kernels to compile together with any of them: most of g++'s time goes into what they share.
bundles: dict[str, list[str]] = {}


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process compiles, the others wait for its result."""
    import fcntl  # not on Windows, where nothing here runs

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_library(code: str, options: Sequence[str], names: Iterable[str]) -> Path:
    """The shared library with these kernels, from the cache or from g++. KernelError with g++'s messages."""
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
                raise KernelError(f"compilation failed:\n{done.stderr[:8000]}")
        os.replace(f"{scratch}/kernel.so", library)


def _prune(folder: Path) -> None:
    oldest = time.time() - UNUSED_DAYS * 86400
    for path in folder.iterdir():
        try:
            if path.is_file() and path.stat().st_mtime < oldest:
                path.unlink()
        except FileNotFoundError:  # another process was faster
            continue


# ---- modules and kernels -----------------------------------------------------
class SimRawModule:
    """Compiles CUDA C++ for the CPU; the arguments are those of cupy.RawModule, `code` without #include "..."."""

    order = os.environ.get("MINSERVE_SIMT_ORDER", "forward")
    seed = int(os.environ.get("MINSERVE_SIMT_SEED", "0"))
    kernel_class: ClassVar[type[SimKernel]]

    def __init__(
        self, *, code: str, options: Sequence[str] = (), name_expressions: Sequence[str] | None = None
    ) -> None:
        names = list(name_expressions) if name_expressions is not None else plain_kernels(code)
        bundle = bundles.get(code, [])
        self.names = bundle if set(names) <= set(bundle) else names
        self.path = compile_library(code, options, self.names)
        self.library = ctypes.CDLL(str(self.path))
        self.library.simt_signature.restype = ctypes.c_char_p
        self.library.simt_device(ctypes.c_void_p(device_memory.space()), ctypes.c_size_t(device_memory.SPAN))

    def get_function(self, name: str) -> Any:
        if name not in self.names:
            raise KernelError(f"{name} is not among the name expressions of this module")
        return self.kernel_class(self, name)


class SimKernel:
    """One kernel: called as kernel(grid, block, args, shared_mem=0).

    copying: names of kernels that move memory as it is, whether anybody has written it or not.
    """

    copying: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, module: SimRawModule, name: str) -> None:
        self.module, self.name, self.index = module, name, module.names.index(name)
        self.parameters = module.library.simt_signature(self.index).decode().split(",")[:-1]
        self.max_dynamic_shared_size_bytes = STATIC_LIMIT

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0) -> None:
        self.prepare(grid, block, args, shared_mem)()

    def prepare(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_mem: int = 0
    ) -> Callable[[], None]:
        """Check a launch and fix its arguments now, as addresses; calling the result runs it."""
        self._check_shape(tuple(grid), tuple(block), shared_mem)
        if len(args) != len(self.parameters):
            raise KernelError(f"{self.name}: {len(args)} arguments for {len(self.parameters)} parameters")
        boxes = [self._box(i, *pair) for i, pair in enumerate(zip(args, self.parameters, strict=True))]
        dims = (ctypes.c_uint * 6)(*(*grid, 1, 1)[:3], *(*block, 1, 1)[:3])

        def launch() -> None:
            pointers = (ctypes.c_void_p * len(boxes))(*[ctypes.addressof(box) for box in boxes])
            error = ctypes.create_string_buffer(1024)
            how = ORDERS[self.module.order], self.module.seed, self.name in self.copying
            size = ctypes.c_size_t(shared_mem)
            if self.module.library.simt_launch(self.index, dims, size, pointers, *map(int, how), error):
                raise KernelError(f"{self.name}: {self._locate(error.value.decode())}")

        return launch

    def _check_shape(self, grid: tuple[int, ...], block: tuple[int, ...], shared_mem: int) -> None:
        x, y, z = (*block, 1, 1)[:3]
        if min(x, y, z) < 1 or x * y * z > MAX_THREADS or z > 64:
            raise KernelError(f"{self.name}: invalid block {block}")
        x, y, z = (*grid, 1, 1)[:3]
        if min(x, y, z) < 1 or x > 2**31 - 1 or max(y, z) > MAX_GRID_YZ:
            raise KernelError(f"{self.name}: invalid grid {grid}")
        if shared_mem > min(self.max_dynamic_shared_size_bytes, SHARED_LIMIT):
            raise KernelError(
                f"{self.name}: {shared_mem} bytes of dynamic shared memory; raise "
                f"max_dynamic_shared_size_bytes first (here at most {SHARED_LIMIT})"
            )

    def _box(self, i: int, value: Any, kind: str) -> Any:
        """The bytes CuPy would pass for `value`; stricter, since CuPy checks no type at all."""
        where = f"{self.name}: argument {i}"
        if kind[0] == "*":
            return self._pointer(where, value, kind)
        # CuPy passes a Python int as 8 bytes, a float as a double and a NumPy scalar as it is.
        if isinstance(value, int) and not isinstance(value, bool):
            value = np.int64(value)
        elif isinstance(value, float):
            value = np.float64(value)
        if not isinstance(value, np.generic):
            raise KernelError(f"{where} is {type(value).__name__}, but the parameter is {kind}")
        found = type_code(value.dtype)
        same_width = found[0] in "iu" and kind[0] in "iu" and found[1:] == kind[1:]
        if found != kind and not same_width:
            raise KernelError(
                f"{where} is passed as {value.dtype}, but the parameter is {kind}: wrap it, as in numpy.float32(x)"
            )
        data = value.tobytes()
        return (ctypes.c_char * len(data)).from_buffer_copy(data)

    def _pointer(self, where: str, value: Any, kind: str) -> ctypes.c_void_p:
        if isinstance(value, np.uint64) and value == 0:  # None would become some other address (cupy/cupy#9046)
            return ctypes.c_void_p(0)
        array = getattr(value, "_host", value)  # fakecupy.ndarray -> numpy.ndarray
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            raise KernelError(f"{where} is {type(value).__name__}, but the parameter is a pointer")
        if not array.flags.c_contiguous:
            raise KernelError(f"{where} is not contiguous")
        found = type_code(array.dtype)
        # Without ml_dtypes neither NumPy nor CuPy has a bfloat16: such arrays are carried as uint16.
        if kind[1] in "fbiu" and found != kind[1:] and (kind[1:], found) != ("bf2", "u2"):
            raise KernelError(f"{where} has dtype {array.dtype}, but the parameter points to {kind[1:]}")
        return ctypes.c_void_p(array.ctypes.data)

    def _locate(self, message: str) -> str:
        """Replace the address of a fault by file and line, where addr2line is installed."""
        if shutil.which("addr2line") is None:
            return message
        with open("/proc/self/maps") as maps:
            base = next(
                (int(line.split("-")[0], 16) for line in maps if line.rstrip().endswith(str(self.module.path))), 0
            )

        def place(match: re.Match[str]) -> str:
            command = ["addr2line", "-e", str(self.module.path), "-i", hex(int(match[1], 16) - base - 1)]
            found = subprocess.run(command, capture_output=True, text=True).stdout.split("\n")
            return " in " + " < ".join(re.sub(r".*/| \(disc.*", "", s) for s in found if s and "?" not in s)

        return re.sub(r", pc (0x[0-9a-f]+)", place, message)


SimRawModule.kernel_class = SimKernel


def type_code(dtype: np.dtype[Any]) -> str:
    """The name simt_launch.h gives this type."""
    return f"{'u' if dtype.kind == 'b' else dtype.kind}{dtype.itemsize}"
