"""The NumPy backend, operation by operation, against loops that do the arithmetic one number at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from minserve.backend.base import Heads
from minserve.backend.numpy_backend import NumpyBackend
from minserve.backend.numpy_operations import LayerCache, NumpyOperations
from minserve.backend.tensor import HostTensor
from tests.helpers import Part, make_batch

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
