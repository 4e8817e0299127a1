"""A stand-in for the part of CuPy that the CUDA backend may use, on NumPy and the emulator.

Owns the memory and the strictness; fakestream.py owns the timing. It is stricter than CuPy, never more lenient:
* an ndarray is no NumPy array; nothing converts implicitly; only basic indexing; reshape never copies;
* work is queued on its stream and runs only when somebody waits for it (the latest legal schedule), so host buffers
  that are reused too early and missing events give wrong results;
* between begin_capture and end_capture kernels that have run before are recorded and not run, and everything else is an
  error, allocation too; launch() replays them on the same addresses, and fails if an array they use has been freed
  meanwhile;
* what nobody has written kernels can't read, and the host gets as 0xFF bytes (NaN, -1);
* arrays end at an inaccessible page; there are `TOTAL_MEMORY` bytes of them.

What is missing here is not in the subset: take, argmax, concatenate, ufuncs would each compile a kernel at first use.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tests.simt import device_memory
from tests.simt.emulator import KernelError, SimKernel, SimRawModule
from tests.simt.fakestream import Event, Graph, Stream, current, elapsed, nobody_captures, submit, submit_kernel

TOTAL_MEMORY = 4 << 30


class OutOfMemoryError(MemoryError):
    """As cupy.cuda.memory.OutOfMemoryError."""


# ---- memory ------------------------------------------------------------------
class _Memory:
    """One allocation. `data` is its bytes; freed when no array, view or queued work uses it."""

    used = 0
    _live: ClassVar[weakref.WeakValueDictionary[int, _Memory]] = weakref.WeakValueDictionary()

    def __init__(self, nbytes: int) -> None:
        nobody_captures("allocating memory")
        if _Memory.used + nbytes > TOTAL_MEMORY:
            raise OutOfMemoryError(f"Out of memory allocating {nbytes} bytes (allocated so far: {_Memory.used} bytes)")
        address = device_memory.allocate(nbytes)
        self.data = device_memory.view(address, nbytes)
        _Memory.used += nbytes
        _Memory._live[address] = self
        weakref.finalize(self, _Memory._free, address, nbytes)

    @staticmethod
    def _free(address: int, nbytes: int) -> None:
        device_memory.free(address, nbytes)
        _Memory.used -= nbytes


def memory_at(address: int, nbytes: int) -> _Memory:
    """The allocation in which these bytes lie. KernelError if there is none."""
    for start, memory in _Memory._live.items():
        if start <= address and address + nbytes <= start + memory.data.nbytes:
            return memory
    raise KernelError(f"{nbytes} bytes at {address:#x} lie in no array")


class ndarray:
    """A view of device memory; `_host` is the NumPy array behind it."""

    def __init__(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> None:
        size = int(np.prod(shape, dtype=np.int64))
        self._memory = _Memory(size * np.dtype(dtype).itemsize)
        self._host: npt.NDArray[Any] = self._memory.data.view(dtype).reshape(shape)

    def _view(self, host: npt.NDArray[Any]) -> ndarray:
        view = object.__new__(ndarray)
        view._memory, view._host = self._memory, host
        return view

    shape = property(lambda self: self._host.shape)
    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    flags = property(lambda self: self._host.flags)
    data = property(lambda self: types.SimpleNamespace(ptr=self._host.ctypes.data))

    @property
    def _written(self) -> npt.NDArray[np.uint8]:
        """For each byte whether it has been written, [*shape, itemsize]."""
        flags = device_memory.written(self._host.ctypes.data, 1)
        return np.lib.stride_tricks.as_strided(flags, (*self.shape, self.itemsize), (*self._host.strides, 1))

    def __len__(self) -> int:
        return len(self._host)

    def __array__(self, *_: Any, **__: Any) -> npt.NDArray[Any]:
        raise TypeError("no implicit conversion to NumPy: use .get()")

    def reshape(self, *shape: Any) -> ndarray:
        view = self._host.reshape(*shape)
        if view.size and not np.shares_memory(view, self._host):
            raise ValueError("this reshape would copy")
        return self._view(view)

    def view(self, dtype: npt.DTypeLike) -> ndarray:
        return self._view(self._host.view(dtype))

    def __getitem__(self, index: Any) -> ndarray:
        for i in index if isinstance(index, tuple) else (index,):
            if not isinstance(i, (int, np.integer, slice, type(None), type(Ellipsis))):
                raise TypeError("only basic indexing: use a kernel")
        view = self._host[index]
        return self._view(view if isinstance(view, np.ndarray) else self._host[index, ...])

    def fill(self, value: float) -> None:
        submit(lambda: self._write(value), None, (self,), "fill")

    def _write(self, values: Any) -> None:
        self._host[...] = values
        self._written.fill(1)

    def set(self, arr: npt.NDArray[Any], stream: Stream | None = None) -> None:
        """From host memory, asynchronously as from pinned memory: `arr` must not change until the copy has run.

        Nor be freed, which CuPy doesn't prevent: a driver that can read pageable memory makes no copy of it first.
        """
        if not isinstance(arr, np.ndarray) or arr.dtype != self.dtype or arr.shape != self.shape:
            raise TypeError(f"set() needs a NumPy array {self.dtype}{self.shape}")
        owner = arr.base if isinstance(arr.base, np.ndarray) else arr
        alive, where = weakref.ref(owner), types.SimpleNamespace(__array_interface__=arr.__array_interface__)

        def copy() -> None:
            if alive() is None:
                raise KernelError("the host array of a copy to the device was freed before the copy has run")
            self._write(np.asarray(where))

        submit(copy, stream, (self,), "set")

    def get(
        self, stream: Stream | None = None, *, out: npt.NDArray[Any] | None = None, blocking: bool = True
    ) -> npt.NDArray[Any]:
        """To host memory; with blocking=False `out` is filled at some later time. Nothing is not waited for."""
        if out is None and self.size == 0:
            return np.empty(self.shape, self.dtype)
        result = np.empty(self.shape, self.dtype) if out is None else out
        if result.shape != self.shape or result.dtype != self.dtype:
            raise TypeError(f"get() needs an output array {self.dtype}{self.shape}")

        def read() -> None:
            np.copyto(result, self._host)
            result.reshape(-1).view(np.uint8)[self._written.reshape(-1) == 0] = 0xFF

        submit(read, stream, (self,), "get")
        if blocking:
            (stream or current()).synchronize()
        return result


def empty(shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> ndarray:
    return ndarray(shape, dtype)


def zeros(shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> ndarray:
    out = ndarray(shape, dtype)
    out.fill(0)
    return out


def asarray(host: npt.NDArray[Any]) -> ndarray:
    out, pinned = ndarray(host.shape, host.dtype), host.copy()
    out.set(pinned)
    submit(lambda: None, None, (pinned,), "asarray")  # it lives until the copy has run
    return out


def asnumpy(a: ndarray) -> npt.NDArray[Any]:
    return a.get()


# ---- kernels -----------------------------------------------------------------
class _QueuedKernel(SimKernel):
    """Modules load lazily, at a kernel's first launch: one that has never run may not be captured."""

    copying = frozenset({"copy_blocks"})  # whole blocks of the KV cache, of which the first slots have been written
    _loaded = False

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0) -> None:
        if any(isinstance(value, np.ndarray) for value in args):
            raise TypeError("a NumPy array is no device array")
        if current().is_capturing() and not self._loaded:
            raise RuntimeError(f"{self.name} is captured before its first launch, which loads it")
        self._loaded = True
        memories = [value._memory for value in args if isinstance(value, ndarray)]
        submit_kernel(self.prepare(grid, block, args, shared_mem), current(), memories)


class RawModule(SimRawModule):
    kernel_class = _QueuedKernel


# ---- the device --------------------------------------------------------------
class Device:
    id, compute_capability = 0, "90"
    attributes = {"MultiProcessorCount": 4, "MaxSharedMemoryPerBlockOptin": 99 * 1024}  # noqa: RUF012

    def __init__(self, device: int = 0) -> None: ...

    @property
    def mem_info(self) -> tuple[int, int]:
        return TOTAL_MEMORY - _Memory.used, TOTAL_MEMORY

    def synchronize(self) -> None:
        for stream in list(Stream._all.values()):
            stream.synchronize()


__version__ = "simulated"


class CUDARuntimeError(RuntimeError):
    """As cupy.cuda.runtime.CUDARuntimeError."""


class _Runtime:
    CUDARuntimeError = CUDARuntimeError

    @staticmethod
    def getDeviceProperties(device: int) -> dict[str, Any]:
        return {"name": b"SIMT emulator"}


class _Pool:
    def free_all_blocks(self) -> None: ...


def get_default_memory_pool() -> _Pool:
    return _Pool()


def _pinned(nbytes: int) -> memoryview:
    nobody_captures("allocating pinned memory")
    return memoryview(bytearray(nbytes))


cuda = types.SimpleNamespace(
    Stream=Stream,
    Event=Event,
    Graph=Graph,
    Device=Device,
    runtime=_Runtime,
    get_current_stream=current,
    get_elapsed_time=elapsed,
    alloc_pinned_memory=_pinned,
    memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
)
