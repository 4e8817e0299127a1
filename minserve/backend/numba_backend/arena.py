"""Aligned memory for what kernels address: weights, KV cache, buffers, scratch.

Owns nothing itself; whoever takes an array keeps it alive. NumPy aligns to 16 bytes only, and a 64-byte load that
straddles two cache lines costs up to a fifth of a step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from minserve.backend.numba_backend.layout import LINE

Bytes = npt.NDArray[np.uint8]
PAGE = 1 << 21  # a huge page: NumPy asks the kernel for them from 4 MiB on, which spares TLB misses


def aligned(nbytes: int, alignment: int = LINE) -> Bytes:
    """Zeroed bytes whose address is a multiple of `alignment`. Pages are only taken when first touched."""
    raw = np.zeros(nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]


def address(array: npt.NDArray[np.generic] | None) -> int:
    """Where an array's data starts; 0 for None."""
    return 0 if array is None else array.ctypes.data


class Arena:
    """Hands out aligned pieces of large allocations, so that weights lie side by side in huge pages."""

    def __init__(self, chunk_bytes: int = 256 << 20) -> None:
        self._chunk_bytes = chunk_bytes
        self._free: Bytes = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> Bytes:
        """Zeroed bytes, aligned to LINE."""
        padded = -(-nbytes // LINE) * LINE
        if len(self._free) < padded:
            self._free = aligned(max(self._chunk_bytes, padded), PAGE)
        piece, self._free = self._free[:nbytes], self._free[padded:]
        return piece
