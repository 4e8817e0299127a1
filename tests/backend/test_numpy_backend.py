"""The NumPy backend: weights of every precision, programs, sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minserve.backend.base import BackendError, KVSpec, ModelSpec, StepLimits
from minserve.backend.numpy_backend import NumpyBackend, NumpyProgram
from minserve.backend.tensor import Encoding, HostTensor, bfloat16_to_float32
from minserve.batch import SeatReset
from tests.helpers import Part, allow, make_batch, make_sampling


# bug: 81
def test_every_half_precision_value_widens_exactly() -> None:
    """All 65,536 bit patterns, subnormals, infinities and NaNs too, by what the bits mean."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    for encoding, mantissa, bias in ((Encoding.BF16, 7, 127), (Encoding.F16, 10, 15)):
        data = bits.view(np.uint8).reshape(256, -1)
        weight = NumpyBackend().prepare_linear([HostTensor("w", (256, 256), encoding, data)])
        ours = weight.dense.reshape(-1)
        assert ours.dtype == np.float32
        sign = np.where(bits >> 15, -1.0, 1.0)
        exponent = (bits.astype(np.int64) >> mantissa) & ((1 << (15 - mantissa)) - 1)
        fraction = (bits & ((1 << mantissa) - 1)) / (1 << mantissa)
        special = exponent == (1 << (15 - mantissa)) - 1
        value = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
        np.testing.assert_array_equal(ours[~special], (sign * value)[~special])
        np.testing.assert_array_equal(np.isnan(ours), special & (fraction > 0))
        np.testing.assert_array_equal(ours[special & (fraction == 0)], [np.inf, -np.inf])


# bug: 81
def test_mixed_dtypes_in_one_projection_become_float32() -> None:
    values = bfloat16_to_float32(np.array([[0x3F80, 0x4049]], np.uint16))  # 1.0, 3.140625
    half = HostTensor("h", (1, 2), Encoding.F16, np.array([[1.5, -2.0]], np.float16).view(np.uint8))
    brain = HostTensor("b", (1, 2), Encoding.BF16, np.array([[0x3F80, 0x4049]], np.uint16).view(np.uint8))
    dense = NumpyBackend().prepare_linear([half, brain, HostTensor.from_array("f", values)]).dense
    assert dense.dtype == np.float32
    assert dense.tolist() == [[1.5, -2.0], [1.0, 3.140625], [1.0, 3.140625]]


# A model of nothing: its logits are the embedding's rows, so that programs can be tested without one.


VOCAB = 12
LIMITS = StepLimits(max_tokens=64, max_requests=4, max_rows=8, max_model_len=32, num_blocks=6)
SPEC = ModelSpec("test", VOCAB, 32, (KVSpec(1, 2), KVSpec(2, 4)), 1, 1, 1)
TABLE = np.random.default_rng(5).normal(size=(VOCAB, VOCAB)).astype(np.float32)


def new_program() -> NumpyProgram:
    backend = NumpyBackend(block_size=4)
    embedding = backend.prepare_embedding(HostTensor.from_array("w", TABLE), tied=False)
    return backend.build(lambda ops, batch, kv: ops.take(ops.embed(embedding, batch), batch), SPEC, LIMITS)


def test_run_samples_each_row_and_keeps_seat_counts_between_steps() -> None:
    program = new_program()
    batch = make_batch([Part(0, [3], [0], seat=1), Part(0, [4, 5], [1], seat=0)], block_size=4)
    assert program.run(batch).tokens.tolist() == [TABLE[3].argmax(), TABLE[5].argmax()]
    reset = SeatReset(1, np.array([], np.int32), np.array([], np.int32))
    sampling = make_sampling(1, seats=1, penalties=(100, 0, 1))
    drawn = []
    for step in range(VOCAB):
        resets = (reset,) if step == 0 else ()
        step_batch = make_batch([Part(step, [3], [0, 1, 2], seat=1)], block_size=4, sampling=sampling, resets=resets)
        drawn += program.run(step_batch).tokens.tolist()
    assert drawn == np.argsort(-TABLE[3]).tolist()


def test_step_without_logit_rows_returns_nothing() -> None:
    program = new_program()
    batch = make_batch([Part(0, [3, 4], [0], rows=[])], block_size=4)
    assert program.run(batch).tokens.shape == (0,)
    assert program.logits(batch).shape == (0, VOCAB)


def test_copies_come_before_anything_is_computed() -> None:
    program = new_program()
    for layer, cache in enumerate(program._cache):
        cache.k[:] = np.arange(6)[:, None, None, None] + 10 * layer
        cache.v[:] = -cache.k
    seen: list[Any] = []

    def forward(ops: Any, batch: Any, kv: Any) -> np.ndarray:
        seen.append(kv[1].v[:, 0, 0, 0].tolist())
        return np.zeros((1, VOCAB), np.float32)

    program._forward = forward
    program.logits(make_batch([Part(0, [1], [0])], block_size=4, copies=[(1, 4), (2, 1)]))
    assert seen == [[-10.0, -12.0, -12.0, -13.0, -11.0, -15.0]]


# bug: 12, 44
@pytest.mark.parametrize("value", [-1, 10**6])
@pytest.mark.parametrize(
    "field", ["token_ids", "positions", "slots", "block_tables", "logit_rows", "copies", "resets", "bias"]
)
def test_ids_out_of_range_fail_the_step_before_anything_is_written(field: str, value: int) -> None:
    """Not a wrapped index into a neighbour's rows: an error, and the next step is as if nothing had been."""
    program = new_program()
    fine = make_batch([Part(0, [3, 4], [2], seat=0)], block_size=4)
    before = program.logits(fine)
    kept = [cache.k.copy() for cache in program._cache]
    changes: dict[str, Any] = {
        "block_tables": np.array([[value]], np.int32),
        "copies": np.array([[0, value]], np.int32),
        "resets": (SeatReset(0, np.array([value], np.int32), np.array([], np.int32)),),
        "bias": make_sampling(1, bias=[{value: 1.0}]),
    }
    change = changes.get(field, np.array([1, value], np.int32))
    bad = replace(fine, **{"sampling" if field == "bias" else field: change})
    with pytest.raises(ValueError, match=f"{field}.* must lie in 0"):
        program.run(bad)
    for cache, old in zip(program._cache, kept, strict=True):
        np.testing.assert_array_equal(cache.k, old)
    np.testing.assert_array_equal(program.logits(fine), before)


# bug: 36
def test_rows_without_an_allowed_token_give_minus_one_and_the_rest_is_sampled() -> None:
    program = new_program()
    sampling = make_sampling(2, mask=allow(VOCAB, [], [2]))
    batch = make_batch([Part(0, [3], [0]), Part(0, [4], [1])], block_size=4, sampling=sampling)
    assert program.run(batch).tokens.tolist() == [-1, 2]


def test_sizes_and_descriptions() -> None:
    backend = NumpyBackend(block_size=8)
    assert backend.bytes_per_block(SPEC.kv) == 8 * 4 * 2 * (1 * 2 + 2 * 4)
    assert backend.nbytes(backend.prepare_rope(np.ones(3), scale=1.0, max_len=10)) == 2 * 4 * 30
    assert backend.nbytes(backend.prepare_vector(HostTensor.from_array("w", TABLE[0]))) == 4 * VOCAB
    assert backend.free_memory() > 0
    assert "float32" in backend.description
    peaks = backend.peaks()
    assert 1e8 < peaks.bandwidth < 1e13
    assert 1e8 < peaks.flops < 1e15
    assert backend.peaks() is peaks


def test_cache_that_does_not_fit_is_a_clear_error() -> None:
    with pytest.raises(BackendError, match="no memory for a KV cache of 1099511627776 blocks"):
        NumpyBackend().build(lambda *_: None, SPEC, replace(LIMITS, num_blocks=1 << 40))


def test_closing_twice_is_fine() -> None:
    program = new_program()
    program.close()
    program.close()
