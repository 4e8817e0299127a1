"""Whole models on the Numba backend, against the NumPy backend: every family, and what is exactly reproducible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from minserve.backend.base import Checkpoint, StepLimits
from minserve.backend.numba_backend import NumbaBackend
from minserve.backend.numpy_backend import NumpyBackend
from minserve.backend.tensor import Encoding
from minserve.batch import Batch
from minserve.models import load
from minserve.weights.dummy import PRESETS, DummyCheckpoint, load_dummy
from tests.helpers import Part, make_batch
from tests.models.golden import Golden, golden_names

LIMITS = StepLimits(max_tokens=128, max_requests=4, max_rows=128, max_model_len=640, num_blocks=128)
RNG = np.random.default_rng(3)
TOKENS = RNG.integers(0, 256, 640).tolist()
FAR, NEAR, OTHER = range(3, 43), [50, 44, 99, 60], range(100, 128)  # block ids, in order and not


def steps() -> list[Batch]:
    """A prompt in chunks beyond 512 keys, then decoding beside a second prompt, then both decode, then one alone."""
    prompt = [[Part(at, TOKENS[at : at + 128], FAR, rows=range(128))] for at in range(0, 512, 128)]
    tail = [Part(512, TOKENS[512:520], FAR, rows=range(8))]
    mixed = [Part(0, TOKENS[100:137], NEAR, rows=(3, 17, 36)), decoded(520, 7, FAR), Part(0, [9], OTHER)]
    both = [decoded(521, 8, FAR, rows=(0, 0)), decoded(37, 200, NEAR), Part(1, TOKENS[5:21], OTHER)]
    alone = [decoded(522, 1, FAR)]
    return [make_batch(parts) for parts in (*prompt, tail, mixed, both, alone)]


def decoded(start: int, token: int, blocks: Sequence[int], rows: Sequence[int] = (-1,)) -> Part:
    return Part(start, [token], blocks, rows=rows, generated=True)


def logits(name: str, backend: NumbaBackend | NumpyBackend, batches: Sequence[Batch]) -> list[np.ndarray]:
    return logits_of(load_dummy(name).checkpoint, backend, batches)


def logits_of(
    checkpoint: Checkpoint,
    backend: NumbaBackend | NumpyBackend,
    batches: Sequence[Batch],
    max_model_len: int = LIMITS.max_model_len,
) -> list[np.ndarray]:
    model = load(checkpoint, backend, max_model_len)
    program = backend.build(model.forward, model.spec, replace(LIMITS, max_model_len=max_model_len))
    try:
        return [program.logits(batch) for batch in batches]
    finally:
        program.close()


def error(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """The largest relative error of a row of logits."""
    return float(row_errors(ours, theirs).max())


def row_errors(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> np.ndarray:
    a, b = np.concatenate(ours), np.concatenate(theirs)
    return np.asarray(np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1))


@pytest.fixture(params=["llama-tiny", "qwen2-tiny", "qwen3-tiny", "gemma3-tiny", "phi3-tiny"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_every_family_agrees_with_numpy(family: str) -> None:
    name = f"dummy:{family}:Q8_0"
    batches = steps()
    ours = logits(name, NumbaBackend(threads=2), batches)
    assert error(ours, logits(name, NumpyBackend(), batches)) < 0.02  # what a bfloat16 KV cache costs


@pytest.mark.parametrize("name", golden_names())
def test_the_default_backend_agrees_with_transformers(name: str) -> None:
    """The NumPy backend is within 1e-4; here weights, activations and KV cache are bfloat16."""
    golden = Golden.read(name)
    batch = make_batch([Part(0, golden.ids, range(3, 8), rows=range(len(golden.ids)))])
    (ours,) = logits_of(golden.checkpoint(), NumbaBackend(threads=2), [batch], max_model_len=96)
    assert np.abs(ours - golden.logits).max() <= 0.02 * np.abs(golden.logits).max()


@pytest.mark.parametrize("encoding", ["F32", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_encoding_agrees_with_numpy(encoding: str) -> None:
    name = f"dummy:llama-tiny:{encoding}"
    batches = steps()
    ours = logits(name, NumbaBackend(threads=2), batches)
    assert error(ours, logits(name, NumpyBackend(), batches)) < 0.03


WIDE = {  # K-quants come in blocks of 256 weights
    **PRESETS["llama-tiny"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("activations", ["accurate", "int8"])
@pytest.mark.parametrize("encoding", [Encoding.Q4_K, Encoding.Q5_K, Encoding.Q6_K])
def test_every_k_quant_agrees_with_numpy(encoding: Encoding, activations: Literal["accurate", "int8"]) -> None:
    checkpoint, batches = DummyCheckpoint(WIDE, encoding=encoding), steps()
    ours = logits_of(checkpoint, NumbaBackend(threads=2, activations=activations), batches)
    errors = row_errors(ours, logits_of(checkpoint, NumpyBackend(), batches))
    assert np.median(errors) < (0.01 if activations == "accurate" else 0.03)  # random minima cancel in a few rows


def test_threads_do_not_change_a_bit(family: str) -> None:
    name = f"dummy:{family}:Q4_1"
    batches = steps()
    one = logits(name, NumbaBackend(threads=1), batches)
    for threads in (2, 3):
        for a, b in zip(logits(name, NumbaBackend(threads=threads), batches), one, strict=True):
            np.testing.assert_array_equal(a, b)


def test_chunks_and_batch_mates_do_not_change_a_bit(family: str) -> None:
    bits_do_not_depend_on_company(f"dummy:{family}:Q4_1", NumbaBackend(threads=2))


@pytest.mark.parametrize("encoding", ["BF16", "Q8_0", "Q6_K"])
def test_bits_do_not_depend_on_company_in_other_encodings(encoding: str) -> None:
    bits_do_not_depend_on_company(f"dummy:llama-tiny:{encoding}", NumbaBackend(threads=2))


@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize("encoding", ["Q4_1", "Q8_0", "Q6_K"])
def test_bits_do_not_depend_on_company_with_int8_activations(encoding: str, generated: bool) -> None:
    """Tokens of prompts and generated ones, each in the company of both."""
    backend = NumbaBackend(threads=2, activations="int8")
    bits_do_not_depend_on_company(f"dummy:llama-tiny:{encoding}", backend, generated)


def bits_do_not_depend_on_company(name: str, backend: NumbaBackend, generated: bool = False) -> None:
    def part(first: int, last: int, rows: Sequence[int]) -> Part:
        return Part(first, TOKENS[first:last], FAR, rows=rows, generated=generated)

    whole = [make_batch([part(0, 100, range(100))])]
    ones = [make_batch([part(i, i + 1, [0])]) for i in range(100)]
    mate, other = Part(0, TOKENS[200:240], NEAR), Part(0, [3], OTHER, generated=True)
    crowded = [make_batch([mate, part(a, b, range(b - a)), other]) for a, b in ((0, 19), (19, 20), (20, 70), (70, 100))]
    expected = logits(name, backend, whole)[0]
    np.testing.assert_array_equal(np.concatenate(logits(name, backend, ones)), expected)
    together = logits(name, backend, crowded)
    np.testing.assert_array_equal(np.concatenate([rows[1:-1] for rows in together]), expected)
