"""The NumPy backend, operation by operation, against loops that do the arithmetic one number at a time."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import minserve.backend
from minserve.backend import create_backend
from minserve.backend.base import BackendError, Heads, KVSpec, ModelSpec, StepLimits
from minserve.backend.numpy_backend import NumpyBackend, NumpyProgram
from minserve.backend.numpy_operations import LayerCache, NumpyOperations
from minserve.backend.tensor import Encoding, HostTensor, bfloat16_to_float32
from minserve.batch import SeatReset
from minserve.config import EngineConfig, ModelConfig
from tests.helpers import Part, allow, make_batch, make_sampling

OPS = NumpyOperations()
RNG = np.random.default_rng(5)


def random(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def tensor(array: np.ndarray) -> HostTensor:
    return HostTensor.from_array("w", array)


def test_embed_takes_rows_and_scales_them() -> None:
    table = random(10, 4)
    embedding = NumpyBackend().prepare_embedding(tensor(table), tied=True)
    out = OPS.embed(embedding, make_batch([Part(0, [7, 0, 7], [0])]), 8**0.5)
    np.testing.assert_array_equal(out, table[[7, 0, 7]] * np.float32(8**0.5))


def test_rms_norm_of_one_row_at_a_time() -> None:
    x, w = random(3, 8), random(8)
    weight = NumpyBackend().prepare_vector(tensor(w), offset=1.0)
    out = OPS.rms_norm(x, weight, 1e-3)
    for row, ours in zip(x.astype(np.float64), out, strict=True):
        root = math.sqrt(sum(v * v for v in row) / 8 + 1e-3)
        np.testing.assert_allclose(ours, row / root * (1 + w), rtol=2e-6)


def test_linear_stacks_its_tensors_and_adds_the_bias() -> None:
    x, a, b, bias = random(5, 6), random(3, 6), random(4, 6), random(7)
    weight = NumpyBackend().prepare_linear([tensor(a), tensor(b)], tensor(bias))
    expected = np.concatenate([x @ a.T, x @ b.T], axis=1) + bias
    np.testing.assert_allclose(OPS.linear(x, weight), expected, rtol=1e-5, atol=1e-6)
    assert NumpyBackend().nbytes(weight) == 4 * (7 * 6 + 7)


def test_glu_gates_with_silu_and_tanh_gelu() -> None:
    x = np.concatenate([np.linspace(-200, 200, 41), np.full(41, 3.0)]).astype(np.float32)[None]
    silu, gelu = OPS.glu(x, "silu")[0], OPS.glu(x, "gelu")[0]
    for g, s, e in zip(x[0, :41].tolist(), silu, gelu, strict=True):
        assert s == pytest.approx(3 * g / (1 + math.exp(-g)), rel=1e-5, abs=1e-7)
        tanh = math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))
        assert e == pytest.approx(3 * 0.5 * g * (1 + tanh), rel=1e-5, abs=1e-5)


def test_linear_of_a_tied_embedding_is_the_head() -> None:
    table, x = random(9, 4), random(2, 4)
    embedding = NumpyBackend().prepare_embedding(tensor(table), tied=True)
    np.testing.assert_allclose(OPS.linear(x, embedding), x @ table.T, rtol=1e-6)


def new_cache(heads: Heads, blocks: int = 40, block_size: int = 4) -> LayerCache:
    shape = (blocks, block_size, heads.kv, heads.dim)
    return LayerCache(random(*shape), random(*shape))


@pytest.mark.parametrize("rotated", [8, 6, 2])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_write_kv_turns_pairs_and_fills_slots(rotated: int, normed: bool) -> None:
    heads = Heads(q=3, kv=1, dim=8, scale=1.0)
    inverse = 100.0 ** (-np.arange(0, rotated, 2) / rotated)
    rope = NumpyBackend().prepare_rope(inverse, scale=1.5, max_len=50)
    batch = make_batch([Part(5, [1, 1, 1], [7, 2]), Part(40, [1], [*range(20, 31)])], block_size=4)
    cache = new_cache(heads)
    before = cache.k.copy()
    norms = [random(8), random(8)] if normed else [None, None]
    qkv = random(4, heads.cols)
    q = OPS.rope_write_kv(qkv, heads, rope, batch, cache, norms[0], norms[1], 1e-5)

    def turned(vector: np.ndarray, position: int, norm: np.ndarray | None) -> np.ndarray:
        v = vector.astype(np.float64)
        if norm is not None:
            v = v / np.sqrt((v * v).mean() + 1e-5) * norm
        out, half = v.copy(), rotated // 2
        for i in range(half):
            angle = position * inverse[i]
            out[i] = 1.5 * (v[i] * math.cos(angle) - v[i + half] * math.sin(angle))
            out[i + half] = 1.5 * (v[i + half] * math.cos(angle) + v[i] * math.sin(angle))
        return out

    slots = [(2, 1), (2, 2), (2, 3), (30, 0)]  # block, offset of positions 5, 6, 7 and 40
    for t, (position, slot) in enumerate(zip([5, 6, 7, 40], slots, strict=True)):
        x = qkv[t].reshape(5, 8)
        for h in range(3):
            np.testing.assert_allclose(q[t].reshape(3, 8)[h], turned(x[h], position, norms[0]), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(cache.k[slot][0], turned(x[3], position, norms[1]), rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(cache.v[slot][0], x[4])
    untouched = np.ones(before.shape[:2], bool)
    untouched[tuple(zip(*slots, strict=True))] = False
    np.testing.assert_array_equal(cache.k[untouched], before[untouched])


def plain_attention(q: np.ndarray, heads: Heads, parts: list[Part], cache: LayerCache) -> np.ndarray:
    """One token, one head at a time, in float64."""
    out, t = np.zeros((len(q), heads.q, heads.dim)), 0
    size = cache.k.shape[1]
    for part in parts:
        for position in range(part.start, part.start + len(part.tokens)):
            low = 0 if heads.window is None else max(0, position - heads.window + 1)
            at = [(part.blocks[p // size], p % size) for p in range(low, position + 1)]
            for h in range(heads.q):
                kv = h * heads.kv // heads.q
                query = q[t].reshape(heads.q, heads.dim)[h].astype(np.float64)
                scores = np.array([heads.scale * float(query @ cache.k[slot][kv]) for slot in at])
                if heads.softcap is not None:
                    scores = heads.softcap * np.tanh(scores / heads.softcap)
                weights = np.exp(scores - scores.max())
                values = np.array([cache.v[slot][kv] for slot in at], np.float64)
                out[t, h] = weights / weights.sum() @ values
            t += 1
    return out.reshape(len(q), -1)


@pytest.mark.parametrize("window", [None, 1, 4, 5, 1000])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_attention_of_mixed_requests(window: int | None, q_heads: int, kv_heads: int, softcap: float | None) -> None:
    """A decode, a first chunk, a later chunk that crosses blocks and one that fills them exactly."""
    heads = Heads(q_heads, kv_heads, 8, 0.4, window, softcap)
    parts = [
        Part(13, [0], [9, 3, 30, 1]),
        Part(0, [0] * 5, [4, 5]),
        Part(6, [0] * 7, [31, 8, 6, 2]),
        Part(4, [0] * 8, [20, 11, 10]),
    ]
    q = random(21, q_heads * 8)
    cache = new_cache(heads)
    out = OPS.attention(q, heads, make_batch(parts, block_size=4), cache)
    np.testing.assert_allclose(out, plain_attention(q, heads, parts, cache), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 100])
def test_attention_of_a_chunk_longer_than_a_tile(window: int | None) -> None:
    heads = Heads(2, 1, 4, 0.5, window)
    parts = [Part(30, [0] * 300, list(range(83)))]
    q = random(300, 8)
    cache = new_cache(heads, blocks=83)
    out = OPS.attention(q, heads, make_batch(parts, block_size=4), cache)
    np.testing.assert_allclose(out, plain_attention(q, heads, parts, cache), rtol=1e-4, atol=1e-5)


def test_take_gives_the_wanted_rows() -> None:
    x = random(6, 3)
    batch = make_batch([Part(0, [1] * 4, [0], rows=[1, 3]), Part(0, [1] * 2, [1], rows=[])])
    np.testing.assert_array_equal(OPS.take(x, batch), x[[1, 3]])


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
    dense = NumpyBackend().prepare_linear([half, brain, tensor(values)]).dense
    assert dense.dtype == np.float32
    assert dense.tolist() == [[1.5, -2.0], [1.0, 3.140625], [1.0, 3.140625]]


# A model of nothing: its logits are the embedding's rows, so that programs can be tested without one.

VOCAB = 12
LIMITS = StepLimits(max_tokens=64, max_requests=4, max_rows=8, max_model_len=32, num_blocks=6)
SPEC = ModelSpec("test", VOCAB, 32, (KVSpec(1, 2), KVSpec(2, 4)), 1, 1, 1)
TABLE = random(VOCAB, VOCAB)


def new_program() -> NumpyProgram:
    backend = NumpyBackend(block_size=4)
    embedding = backend.prepare_embedding(tensor(TABLE), tied=False)
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
    assert backend.nbytes(backend.prepare_vector(tensor(random(5)))) == 20
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


def choose(
    monkeypatch: pytest.MonkeyPatch, installed: set[str], quantize: Any = "none", **engine: Any
) -> tuple[Any, list[str]]:
    """What create_backend gives where only `installed` is installed, and what it tells."""
    monkeypatch.setattr(minserve.backend, "_installed", lambda module: module in installed)
    lines: list[str] = []
    return create_backend(EngineConfig(**engine), ModelConfig(quantize=quantize), note=lines.append), lines


def test_numpy_runs_when_asked_for_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, lines = choose(monkeypatch, {"numba", "cupy"}, backend="numpy", block_size=32)
    assert (backend.name, backend.block_size, lines) == ("numpy", 32, [])


def test_numpy_steps_in_for_numba_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, lines = choose(monkeypatch, set())
    assert backend.name == "numpy"
    assert lines == [minserve.backend.NO_NUMBA]


def test_numpy_steps_in_for_a_numba_that_can_not_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a NumPy that is too new for it."""
    monkeypatch.setitem(sys.modules, "numba", None)
    backend, lines = choose(monkeypatch, {"numba"})
    assert backend.name == "numpy"
    assert len(lines) == 1
    assert "Numba can't be imported, so the NumPy backend runs" in lines[0]
    monkeypatch.setitem(sys.modules, "minserve.backend.numba_backend", None)
    with pytest.raises(BackendError, match="numba is installed, but can't be imported"):
        choose(monkeypatch, {"numba"}, backend="numba")


@pytest.mark.parametrize(("installed", "name"), [({"cupy", "numba"}, "numba"), ({"cupy"}, "numpy")])
def test_a_gpu_that_can_not_be_used_is_told_and_the_cpu_steps_in(
    installed: set[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = SimpleNamespace(driverGetVersion=lambda: 0)
    cupy = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False, runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    backend, lines = choose(monkeypatch, installed)
    assert backend.name == name
    assert "CuPy is installed, but no GPU can be used: No NVIDIA driver was found" in lines[0]
    assert lines[1:] == ([] if name == "numba" else [minserve.backend.NO_NUMBA])
    with pytest.raises(BackendError, match="No NVIDIA driver was found"):
        choose(monkeypatch, installed, device="cuda")


@pytest.mark.parametrize(
    ("engine", "quantize", "message"),
    [
        ({"backend": "numba"}, "none", "needs Numba: `pip install numba`"),
        ({"backend": "cuda"}, "none", "needs CuPy"),
        ({"device": "cuda"}, "none", "needs CuPy"),
        ({"backend": "cuda", "device": "cpu"}, "none", "the cuda backend does not run on the device cpu"),
        ({"backend": "numpy", "device": "cuda"}, "none", "the numpy backend does not run on the device cuda"),
        ({"backend": "numpy"}, "q8", "quantize = 'q8' needs the numba backend"),
    ],
)
def test_what_was_asked_for_and_cannot_run_is_an_error(
    monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], quantize: str, message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        choose(monkeypatch, set(), quantize, **engine)
