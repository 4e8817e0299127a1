"""The .cu files, compiled for the loaded model: only the instantiations that were asked for.

Owns reading the sources, the modules made of them, and what kernels take: their number types as NumPy has them. It must
not know what a kernel computes or who launches it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from minserve.backend.base import BackendError

Progress = Callable[[str], None]
_INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')
# Bytes of shared memory that a launch may ask for without opting in: 48 KiB less the little that kernels declare.
STATIC_SHARED_LIMIT = 47 * 1024
DTYPES: dict[str, np.dtype[Any]] = {  # NumPy has no bfloat16: its bits
    "float": np.dtype(np.float32),
    "half": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
}
i32, f32 = np.int32, np.float32
NULL = np.uint64(0)  # CuPy passes None as some other address (cupy/cupy#9046)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def read_source(name: str) -> str:
    return files("minserve.kernels_cuda").joinpath(name).read_text(encoding="utf-8")


def flatten(name: str, read: Callable[[str], str] | None = None) -> str:
    """The file with its #include "..." files pasted in, once each, with #line marks.

    CuPy caches compiled code by the source text alone: with real includes, an edited .cuh would not be noticed.
    """
    seen: set[str] = set()

    def paste(name: str) -> str:
        seen.add(name)
        out = [f'#line 1 "{name}"']
        for number, line in enumerate((read or read_source)(name).splitlines(), 1):
            match = _INCLUDE.match(line)
            if match is None:
                out.append("" if line.strip() == "#pragma once" else line)
            elif match[1] in seen:
                out.append("")
            else:
                out += [paste(match[1]), f'#line {number + 1} "{name}"']
        return "\n".join(out)

    return paste(name)


class Kernel:
    """One instantiation, callable after Kernels.compile. shared: the most dynamic shared memory a launch uses."""

    def __init__(self, file: str, name: str) -> None:
        self.file, self.name, self.shared = file, name, 0
        self._function: Any = None

    def link(self, module: Any) -> None:
        self._function = module.get_function(self.name)
        if self.shared > STATIC_SHARED_LIMIT:
            self._function.max_dynamic_shared_size_bytes = self.shared

    @property
    def linked(self) -> bool:
        return self._function is not None

    def __call__(self, grid: Sequence[int], threads: int, *arguments: Any, shared: int = 0) -> None:
        """Launch on the current stream. None is a null pointer.

        Scalars must be NumPy scalars of the parameter's type: CuPy checks none.
        """
        words = tuple(NULL if argument is None else argument for argument in arguments)
        self._function(tuple(grid), (threads,), words, shared_mem=shared)


class Kernels:
    """What a program needs. Ask with `get` while building it, then `compile` once."""

    def __init__(self, cp: Any) -> None:
        self._cp = cp
        self._kernels: dict[tuple[str, str], Kernel] = {}

    def get(self, file: str, name: str, *parameters: object, shared: int = 0) -> Kernel:
        """The kernel name<parameters> of file.cu. shared: bytes of dynamic shared memory that launches will use."""
        words = [str(p).lower() if isinstance(p, bool) else str(p) for p in parameters]
        full = f"{name}<{','.join(words)}>" if words else name
        kernel = self._kernels.setdefault((file, full), Kernel(file, full))
        kernel.shared = max(kernel.shared, shared)
        return kernel

    def names(self) -> list[tuple[str, str]]:
        """(file, name) of every kernel asked for."""
        return list(self._kernels)

    def compile(self, progress: Progress = lambda _: None) -> None:
        """Compile what was asked for and isn't linked yet, one module per file.

        CuPy 14.2 keeps the result on disk; 13 compiles templates at every start, to learn their names.
        """
        pending = [kernel for kernel in self._kernels.values() if not kernel.linked]
        by_file: dict[str, list[Kernel]] = {}
        for kernel in pending:
            by_file.setdefault(kernel.file, []).append(kernel)
        for file, group in by_file.items():
            progress(f"compiling {file}.cu ({len(group)} kernels)")
            names = tuple(kernel.name for kernel in group)
            module = self._cp.RawModule(code=flatten(f"{file}.cu"), options=("-std=c++17",), name_expressions=names)
            for kernel in group:
                self._link(kernel, module)

    def _link(self, kernel: Kernel, module: Any) -> None:
        try:
            kernel.link(module)
        except Exception as error:  # CuPy's compiler, NVRTC and the driver each have their own classes
            raise BackendError(f"{kernel.file}.cu could not be compiled for this GPU: {error}") from error
