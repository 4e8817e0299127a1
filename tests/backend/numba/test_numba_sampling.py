"""The sampling kernel against the specification, minserve.backend.sampling: token by token."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve.backend.numba_backend.arena import aligned
from minserve.backend.numba_backend.layout import width
from minserve.backend.numba_backend.program import select_rows
from minserve.backend.numba_backend.sampling import DRAW, SKIP, sample_rows, scratch_bytes
from minserve.backend.numba_backend.staging import SamplingBuffers
from minserve.backend.sampling import Seats, sample
from minserve.batch import SamplingArrays
from tests.helpers import allow, make_sampling


def draw(logits: np.ndarray, arrays: SamplingArrays, threads: int = 1) -> np.ndarray:
    """The kernel's tokens for every row; its threads run one after the other."""
    rows, vocab = logits.shape
    buffers = SamplingBuffers(rows)
    assert buffers.fill(arrays) == rows
    padded = aligned(rows * width(vocab) * 4).view(np.float32).reshape(rows, -1)
    padded[:, :vocab] = logits
    scratch = aligned(scratch_bytes(width(vocab)))
    values = {name: array.ctypes.data for name, array in buffers.arrays.items()}
    values |= {"logits": padded.ctypes.data, "vocab": vocab, "padded": width(vocab)}
    values |= {"scratch": scratch.ctypes.data, "scratch_stride": 0}
    words = np.array([values[name] for name in sample_rows.fields], np.int64)
    kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(sample_rows.address)
    for tid in range(threads):
        kernel(tid, threads, rows, words.ctypes.data)
    return buffers.arrays["tokens"][:rows].copy()


def expected(logits: np.ndarray, arrays: SamplingArrays) -> np.ndarray:
    return sample(logits, arrays, Seats(logits.shape[1])).tokens


knobs = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-3, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 2, 7, 40, 5000]),
        "top_p": st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        "uniforms": st.floats(0, 1, exclude_max=True, width=32),
    }
)


@settings(deadline=None, max_examples=150)
@given(knobs, st.integers(1, 700), st.integers(0, 2**32), st.sampled_from([0.1, 1.0, 8.0]), st.booleans())
def test_draws_what_the_specification_draws(
    knob: dict[str, Any], vocab: int, seed: int, spread: float, ties: bool
) -> None:
    logits = np.random.default_rng(seed).normal(0, spread, (3, vocab)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    arrays = make_sampling(3, **knob)
    np.testing.assert_array_equal(draw(logits, arrays, threads=2), expected(logits, arrays))


def test_draws_from_a_vocabulary_of_real_size() -> None:
    rng = np.random.default_rng(1)
    logits = (rng.normal(0, 2.5, (24, 49152)) + 6 * (rng.random((24, 49152)) < 0.001)).astype(np.float32)
    uniforms = np.linspace(0, 0.999999, 24)
    knobs: tuple[dict[str, Any], ...] = (
        {},
        {"top_p": 0.9},
        {"top_k": 50},
        {"top_k": 40, "top_p": 0.8},
        {"min_p": 0.05},
        {"top_p": 0.3},
    )
    for knob in knobs:
        arrays = make_sampling(24, temperature=0.8, uniforms=uniforms, **knob)
        np.testing.assert_array_equal(draw(logits, arrays), expected(logits, arrays), str(knob))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_allow_no_token(temperature: float) -> None:
    bad = np.full((4, 100), -np.inf, np.float32)
    bad[1, 5], bad[2, 50], bad[3, [2, 3]] = np.nan, np.inf, (1.0, np.nan)
    arrays = make_sampling(4, temperature=temperature)
    np.testing.assert_array_equal(draw(bad, arrays), [-1, -1, -1, -1])


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = np.zeros((1, 200), np.float32)
    logits[0, [150, 131, 199]] = 4
    assert draw(logits, make_sampling(1)) == [131]


def test_only_plain_rows_are_drawn_by_the_kernel() -> None:
    vocab = 40
    arrays = make_sampling(
        6,
        targets=[-1, 3, -1, -1, -1, -1],
        logprobs=[-1, -1, 0, -1, -1, -1],
        penalties=[(0, 0, 1)] * 3 + [(0.5, 0, 1)] + [(0, 0, 1)] * 2,
        bias=[{}, {}, {}, {}, {3: 1.0}, {}],
        mask=allow(vocab, None, None, None, None, None, [1, 2]),
    )
    buffers = SamplingBuffers(8)
    buffers.kinds[:] = 77
    assert buffers.fill(arrays) == 1
    assert buffers.kinds.tolist() == [DRAW, SKIP, SKIP, SKIP, SKIP, SKIP, 77, 77]


def test_sampling_arrays_of_different_lengths_are_refused() -> None:
    arrays = make_sampling(3)
    for name in ("top_p", "min_p", "uniforms", "top_k", "targets", "logprobs", "penalties", "bias_starts"):
        with pytest.raises(ValueError, match="differ in length"):
            SamplingBuffers(4).fill(replace(arrays, **{name: getattr(arrays, name)[:-1]}))
    with pytest.raises(ValueError, match="differ in length"):
        SamplingBuffers(4).fill(replace(arrays, mask=allow(9, [1], [2])))


def test_selected_rows_keep_their_bias_and_mask() -> None:
    bias = [{1: 5.0}, {}, {2: 9.0, 3: -1.0}, {0: 4.0}]
    arrays = make_sampling(4, bias=bias, mask=allow(4, None, [1], None, [0, 2]), uniforms=[0.1, 0.2, 0.3, 0.4])
    logits = np.arange(16, dtype=np.float32).reshape(4, 4) % 3
    rows = np.array([0, 2, 3])
    np.testing.assert_array_equal(expected(logits[rows], select_rows(arrays, rows)), expected(logits, arrays)[rows])
