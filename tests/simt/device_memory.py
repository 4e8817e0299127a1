"""The stand-in's device memory: a range of addresses, and for each byte whether anybody has written it.

Owns where arrays lie. An array ends at an inaccessible page, and no address is handed out twice, so that using a freed
one faults. What has been written is noted `SPAN` bytes behind: by the emulator for loads and stores of kernels
(simt_shared.h), by fakecupy and fakeblas for what they do. It must not know arrays or kernels.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

SPAN = 1 << 40  # bytes; they take memory when they are used
_PAGE = mmap.PAGESIZE
_NOTHING, _READ_WRITE = 0, 3
_PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = 0x02, 0x10, 0x20, 0x4000  # Linux's
_DONTNEED = 4


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return libc


def _map(address: int | None, nbytes: int, access: int) -> int:
    flags = _PRIVATE | _ANONYMOUS | _NORESERVE | (0 if address is None else _FIXED)
    found: int = _libc().mmap(address, nbytes, access, flags, -1, 0)
    if found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


@functools.cache
def space() -> int:
    """Where device memory begins."""
    begin = _map(None, 2 * SPAN, _NOTHING)
    _map(begin + SPAN, SPAN, _READ_WRITE)
    return begin


_taken = 0  # bytes of the space


def allocate(nbytes: int) -> int:
    """Address of new memory, a multiple of 16. MemoryError at the end of the space."""
    global _taken
    room, pages = _sizes(nbytes)
    begin = space() + _taken
    if _taken + pages + _PAGE > SPAN:
        raise MemoryError("the emulated device has no addresses left")
    _taken += pages + _PAGE
    _map(begin, pages, _READ_WRITE)
    written(begin + pages, _PAGE)[:] = 1  # so that it is the access that faults
    return begin + pages - room


def free(address: int, nbytes: int) -> None:
    room, pages = _sizes(nbytes)
    begin = address + room - pages
    _map(begin, pages, _NOTHING)
    _libc().madvise(begin + SPAN, pages + _PAGE, _DONTNEED)


def _sizes(nbytes: int) -> tuple[int, int]:
    """Rounded up to what an address is a multiple of, and to pages."""
    room = -(-max(nbytes, 1) // 16) * 16
    return room, -(-room // _PAGE) * _PAGE


def view(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """These bytes. Whoever uses it keeps them from being freed."""
    buffer: Any = (ctypes.c_char * max(nbytes, 1)).from_address(address)
    return np.ndarray((nbytes,), np.uint8, buffer)


def written(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """1 for each of these bytes that has been written, else 0."""
    return view(address + SPAN, nbytes)
