"""Three bytes for two integers: what lets 4-bit weights meet activations of almost 12 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minserve.backend.numba_backend.arena import aligned
from minserve.backend.numba_backend.jit import entry
from minserve.backend.numba_backend.quantize import store_shared
from minserve.backend.numba_backend.simd_memory import load_f32

MOST = 1904


@entry()
def share_pairs(a: Any, b: Any, q: Any, count: Any) -> None:
    for i in range(count):
        store_shared(q + 48 * i, load_f32(a, 16 * i), load_f32(b, 16 * i))


def bytes_of(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[n] integers each -> [3, n] signed bytes u, v, s; n a multiple of 16."""
    floats = [aligned(4 * len(x)).view(np.float32) for x in (a, b)]
    for target, x in zip(floats, (a, b), strict=True):
        target[:] = x
    q = aligned(3 * len(a))
    share_pairs.compile()
    share_pairs(floats[0].ctypes.data, floats[1].ctypes.data, q.ctypes.data, len(a) // 16)
    return q.view(np.int8).reshape(-1, 3, 16).swapaxes(0, 1).reshape(3, -1).astype(np.int64)


@pytest.mark.parametrize("first", [-MOST, -1000, -17, 0, 5, 1023, MOST])
def test_every_pair_is_exact(first: int) -> None:
    b = np.resize(np.arange(-MOST, MOST + 1), 3824)
    a = np.clip(first + np.arange(len(b)) % 33 - 16, -MOST, MOST)
    u, v, s = bytes_of(a, b)
    assert (16 * u + s == a).all()
    assert (v + 16 * s == b).all()
