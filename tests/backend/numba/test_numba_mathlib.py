"""Powers are right over all of float32, on every kind of processor: nothing overflows into the sign, and 0 is 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minserve.backend.numba_backend import jit
from minserve.backend.numba_backend.arena import aligned
from minserve.backend.numba_backend.jit import entry
from minserve.backend.numba_backend.mathlib import activate, vexp, vexp2
from minserve.backend.numba_backend.simd_memory import load_f32, store_f32
from tests.backend.numba.test_numba_team import CPUS, in_process


@entry()
def powers(x: Any, e: Any, two: Any, silu: Any) -> None:
    v = load_f32(x, 0)
    store_f32(e, 0, vexp(v))
    store_f32(two, 0, vexp2(v))
    store_f32(silu, 0, activate(1, v))


def check() -> None:
    edges = [0.0, 1e-3, 0.5, 1.0, 3.3, 20.0, 60.0, 86.9, 87.1, 89.5, 95.0, 100.0, 125.9, 126.1, 150.0, 1e4]
    for x in (np.array(edges, np.float32), -np.array(edges, np.float32)):
        given, *out = (aligned(64).view(np.float32) for _ in range(4))
        given[:] = x
        powers(*(a.ctypes.data for a in (given, *out)))
        e, two, silu = out
        wide = x.astype(np.float64)
        exact = np.where(x < -87, 0, np.exp(np.minimum(wide, 88)))
        np.testing.assert_allclose(e, exact, rtol=1e-6)
        if (x <= 0).all():
            np.testing.assert_allclose(two, np.where(x < -126, 0, np.exp2(np.maximum(wide, -150))), rtol=1e-6)
        np.testing.assert_allclose(silu, wide / (1 + np.exp(-np.maximum(wide, -700))), rtol=1e-6, atol=1e-34)


def test_powers() -> None:
    check()


@pytest.mark.slow
@pytest.mark.skipif(jit.machine() != "x86_64", reason="these are x86 processors")
@pytest.mark.parametrize("cpu", CPUS)
def test_powers_on_older_processors(cpu: str) -> None:
    name, features = CPUS[cpu]
    code = "from tests.backend.numba.test_numba_mathlib import check; check()"
    in_process(code, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features)
