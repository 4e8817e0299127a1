"""SimRawModule: the interface of cupy.RawModule, with kernels that run on the CPU.

Owns launches: what CuPy or a GPU would refuse of a launch's shape and arguments, the order in which threads take turns,
and where a fault lies in the source. It must not know CuPy's arrays (fakecupy.py) nor any particular kernel.

MINSERVE_SIMT_ORDER=forward|reverse|shuffle and MINSERVE_SIMT_SEED choose the schedule.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from tests.simt import device_memory
from tests.simt.build import compile_library, plain_kernels

ORDERS = {"forward": 0, "reverse": 1, "shuffle": 2}
SHARED_LIMIT = 99 * 1024  # opt-in maximum of consumer GPUs, in bytes a block; A100: 163 KiB, H100: 227 KiB
STATIC_LIMIT = 47 * 1024  # 48 KiB without opting in, less what a kernel declares itself
MAX_THREADS, MAX_GRID_YZ = 1024, 65535


class KernelError(RuntimeError):
    """A kernel did something that is an error, or undefined, on a GPU."""


# Source -> kernels to compile together with any of them: most of g++'s time goes into what they share.
bundles: dict[str, list[str]] = {}


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
