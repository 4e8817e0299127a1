"""Dot products are exact whichever instructions compute them, at the largest weights and activations too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minserve.backend.numba_backend import jit
from minserve.backend.numba_backend.arena import aligned
from minserve.backend.numba_backend.dot import dot_tile
from minserve.backend.numba_backend.jit import Entry, entry, inlined
from minserve.backend.numba_backend.simd_memory import load_u8, store_i32
from minserve.backend.numba_backend.tile import zeros_i32
from minserve.backend.numba_backend.unpack import five_bits, nibbles, six_bits, whole_bytes
from tests.backend.numba.test_numba_team import CPUS, in_process

TOKENS, K = 3, 32
Bytes = np.ndarray


@inlined
def leave(out: Any, tile: Any) -> None:
    a, b, c = tile
    store_i32(out, 0, a)
    store_i32(out, 16, b)
    store_i32(out, 32, c)


@entry()
def four(w: Any, x: Any, out: Any) -> None:
    leave(out, dot_tile(zeros_i32(3), nibbles(w)[:8], x, 0, 32))


@entry()
def five(w: Any, x: Any, out: Any) -> None:
    leave(out, dot_tile(zeros_i32(3), five_bits(w), x, 0, 32))


@entry()
def six(w: Any, x: Any, out: Any) -> None:
    v, high = nibbles(w), load_u8(w, 256)
    leave(out, dot_tile(zeros_i32(3), six_bits(v[0], v[1], v[2], v[3], high), x, 0, 32))


@entry()
def eight(w: Any, x: Any, out: Any) -> None:
    leave(out, dot_tile(zeros_i32(3), whole_bytes(w), x, 0, 32))


@entry()
def four_and_eight(w: Any, x: Any, out: Any) -> None:
    leave(out, dot_tile(zeros_i32(3), nibbles(w)[4:], x, 0, 32))


def unpacked(v: Bytes) -> dict[Entry, Bytes]:
    """v [8, 64] packed bytes -> what each entry multiplies, [4 or 8, 64]."""
    low, high = v[:4] & 15, v[:4] >> 4
    both, planes = np.concatenate([low, high]), v[4]
    return {
        four: both,
        five: both | np.stack([(planes >> j & 1) << 4 for j in range(8)]),
        six: low | np.stack([(planes >> 2 * j & 3) << 4 for j in range(4)]),
        eight: v,
        four_and_eight: np.concatenate([high, v[:4]]),
    }


def check() -> None:
    rng = np.random.default_rng(5)
    packed, tokens, out = aligned(512), aligned(TOKENS * K), aligned(TOKENS * 64)
    weights = [np.full(512, 255, np.uint8), *rng.integers(0, 256, (4, 512), np.uint8)]
    activations = [np.full((TOKENS, K), x, np.int8) for x in (127, -128)]
    activations.append(rng.integers(-128, 128, (TOKENS, K), np.int8))
    for w in weights:
        packed[:] = w
        for compute, bytes_of in unpacked(w.reshape(8, 64)).items():
            k4 = bytes_of.reshape(-1, 16, 4).astype(np.int64)  # [j, row, i]: k = 4 j + i
            for x in activations:
                tokens.view(np.int8)[:] = x.reshape(-1)
                compute(packed.ctypes.data, tokens.ctypes.data, out.ctypes.data)
                expected = np.einsum("jri,tji->tr", k4, x.reshape(TOKENS, -1, 4)[:, : len(k4)].astype(np.int64))
                np.testing.assert_array_equal(out.view(np.int32).reshape(TOKENS, 16), expected, compute.name)


def test_dot_products_are_exact() -> None:
    check()


@pytest.mark.slow
@pytest.mark.skipif(jit.machine() != "x86_64", reason="these are x86 processors")
@pytest.mark.parametrize("cpu", CPUS)
def test_dot_products_are_exact_on_older_processors(cpu: str) -> None:
    name, features = CPUS[cpu]
    code = """
from minserve.backend.numba_backend.dot import HAS_AVX2, HAS_VNNI
from tests.backend.numba.test_numba_dot import check
check()
print(HAS_AVX2, HAS_VNNI)
"""
    printed = in_process(code, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features)
    assert printed.split() == [str(cpu == "avx2"), "False"]
