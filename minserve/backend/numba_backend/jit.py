"""How kernels are compiled, when, and where their machine code is kept.

Owns the three kinds of compiled function (helper, Kernel, Entry) and the cache folder. It must not know what a kernel
computes. Nothing is compiled at import: a kernel is compiled, or read from the cache, when its address is first asked
for, so a model pays only for the kernels it uses.

The cache folder is named after a hash of all sources of this package, the versions of numba and llvmlite and the CPU:
numba itself notices a change of the file a function stands in, but not of the files it imports, nor of this module's
choice of instructions.
"""

# mypy: disable-error-code="no-untyped-call, no-any-return"

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
from numba import cfunc, njit, types

# No fastmath: LLVM may then contract or reassociate one copy of an unrolled loop and not the other, and a token's bits
# would depend on its place in the batch. Kernels write fused multiply-adds where they want them.
OPTIONS = {"error_model": "numpy"}

# Helpers are compiled into the kernels that call them and need no cache entry of their own. LLVM decides whether a
# helper is inlined; `inlined` leaves it no choice, for those that pass vectors around. numba lets LLVM optimize every
# function together with all it calls, once per level of nesting; `merged` functions are inlined by numba before that,
# which keeps the large ones from being compiled over and over.
_INNER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, **OPTIONS}
helper = njit(**_INNER)
inlined = njit(forceinline=True, **_INNER)
merged = njit(inline="always", **_INNER)

_lock = threading.RLock()


def cpu_name() -> str:
    return numba.config.CPU_NAME or llvm.get_host_cpu_name()


def is_zen() -> bool:
    """Whether code is generated for an AMD Zen. Constants that depend on how a CPU fetches ahead, or on what its
    instructions cost, come in two: measured there, and measured on an Intel (Sapphire Rapids), for all others."""
    return cpu_name().startswith("znver")


def machine() -> str:
    """The architecture that code is generated for: x86_64, aarch64, ..."""
    return str(llvm.get_process_triple().split("-")[0])


def cpu_has(feature: str) -> bool:
    """Whether code is generated for a CPU with this LLVM feature. NUMBA_CPU_FEATURES overrides what is detected."""
    chosen = numba.config.CPU_FEATURES
    if chosen is not None:
        return f"+{feature}" in chosen.split(",")
    return bool(llvm.get_host_cpu_features().get(feature))


@functools.cache
def may_use_amx() -> bool:
    """Whether the system lets this process use the registers of Intel's matrix unit: Linux wants to be asked."""
    if machine() != "x86_64" or not sys.platform.startswith("linux"):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def cache_folder() -> Path:
    """MINSERVE_CACHE, or the platform's folder for caches."""
    if named := os.environ.get("MINSERVE_CACHE"):
        return Path(named)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "minserve"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "minserve"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minserve"


@functools.cache
def fingerprint() -> str:
    """A name for the machine code that these sources give on this CPU."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    features = numba.config.CPU_FEATURES
    if features is None:
        features = ",".join(sorted(name for name, on in llvm.get_host_cpu_features().items() if on))
    amx = str(may_use_amx())
    for part in (numba.__version__, llvmlite.__version__, sys.version, cpu_name(), features, amx):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def _folder() -> Path:
    return cache_folder() / "kernels" / fingerprint()


@contextmanager
def _numba_cache() -> Iterator[bool]:
    """Point numba's cache at our folder while a function is declared; False if nothing can be stored there.

    Only while: other users of numba in this process keep their own setting.
    """
    folder = _folder()
    before = numba.config.CACHE_DIR
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    with _lock:
        try:
            numba.config.CACHE_DIR = str(folder) if writable else before
            yield writable
        finally:
            numba.config.CACHE_DIR = before


class Kernel:
    """A tape operation: `body(tid, threads, rows, params)` with four int64, called by address.

    fields names the words at `params`, in order, so that whoever emits a row gives them by name.
    """

    seconds: dict[str, float] = {}  # noqa: RUF012  (kernel -> what compiling or loading it took, for progress and tests)

    def __init__(self, body: Callable[..., None], fields: tuple[str, ...]) -> None:
        self.body = body
        self.name = body.__name__
        self.fields = fields
        self._compiled: Any = None

    def __repr__(self) -> str:
        return self.name

    @property
    def cached(self) -> bool:
        """Whether `address` will be quick: compiled already, or its index lies in the cache folder."""
        return self._compiled is not None or any(_folder().glob(f"*/{Path(self._file()).stem}.{self.name}-*.nbi"))

    def _file(self) -> str:
        return self.body.__code__.co_filename

    @property
    def address(self) -> int:
        """Where the machine code starts: compiled, or loaded from the cache, on first use."""
        with _lock:
            if self._compiled is None:
                start = time.perf_counter()
                with _numba_cache() as cached:
                    signature = types.void(types.int64, types.int64, types.int64, types.int64)
                    self._compiled = cfunc(signature, nopython=True, cache=cached, **OPTIONS)(self.body)
                Kernel.seconds[self.name] = time.perf_counter() - start
        return self._compiled.address


def kernel(fields: str) -> Callable[[Callable[..., None]], Kernel]:
    """Declare a kernel with the names of its parameter words."""
    return lambda body: Kernel(body, tuple(fields.split()))


def variant(template: Callable[..., None], fields: str, name: str, **bindings: Any) -> Kernel:
    """A kernel from a template: the same code with other globals, which are compile-time constants to numba.

    Unlike closures, such functions find their machine code in the cache again.
    """
    body = FunctionType(template.__code__, {**template.__globals__, **bindings}, name)
    body.__qualname__ = name
    return Kernel(body, tuple(fields.split()))


def bound(template: Callable[..., Any], **bindings: Any) -> Any:
    """The same for a function to be inlined: a template's code with other globals."""
    return inlined(FunctionType(template.__code__, {**template.__globals__, **bindings}, template.__name__))


class Entry:
    """A function that Python calls: releases the GIL, compiled on first use."""

    def __init__(self, body: Callable[..., Any], result: Any, arguments: Sequence[Any]) -> None:
        self.body = body
        self.name = body.__name__
        self.result = result
        self.arguments = arguments or [types.int64] * body.__code__.co_argcount
        self._compiled: Any = None

    def compile(self) -> Any:
        with _lock:
            if self._compiled is None:
                signature = self.result(*self.arguments)
                with _numba_cache() as cached:
                    self._compiled = njit([signature], nogil=True, cache=cached, **OPTIONS)(self.body)
        return self._compiled

    def __call__(self, *args: Any) -> Any:
        return (self._compiled or self.compile())(*args)


def entry(result: Any = types.void, *arguments: Any) -> Callable[[Callable[..., Any]], Entry]:
    """Declare a function for Python, with the numba types of its result and its arguments: int64 unless given."""
    return lambda body: Entry(body, result, arguments)
