"""Every operation of the Numba backend against the NumPy backend, over shapes with tails and every way to fuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve.backend.base import Backend, BackendError, Forward, Heads
from minserve.backend.numba_backend import NumbaBackend
from minserve.backend.tensor import BLOCKS, Encoding
from tests.backend.numba.programs import compare, run, tensor, vector
from tests.helpers import Part, make_batch

seeds = st.integers(0, 2**32)
relaxed = settings(deadline=None, max_examples=25)


def rows_batch(rng: np.random.Generator, count: int, vocab: int) -> Any:
    """A step of `count` tokens, all of whose rows are wanted."""
    tokens = rng.integers(0, vocab, count).tolist()
    return make_batch([Part(0, tokens, range(12), rows=range(count))])


@relaxed
@given(
    st.sampled_from([e.value for e in Encoding]),
    st.sampled_from(["accurate", "int8"]),
    st.sampled_from([1, 2, 3, 5, 8, 11, 64, 65, 77, 130]),
    st.integers(1, 4),
    st.integers(1, 200),
    seeds,
)
def test_linear_of_every_encoding(encoding: str, activations: str, count: int, blocks: int, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    k = blocks * max(BLOCKS[Encoding(encoding)].weights, 32)
    table, weight, bias = tensor(rng, 50, k), tensor(rng, n, k, encoding), vector(rng, n)

    def make(backend: Backend) -> Forward:
        embedding = backend.prepare_embedding(table, tied=False)
        matrix = backend.prepare_linear([weight], bias)
        return lambda ops, batch, kv: ops.linear(ops.take(ops.embed(embedding, batch, 3.0), batch), matrix)

    accurate = (
        encoding not in ("F32", "F16", "BF16") and activations == "accurate"
    )  # 16 bits, or 12 beside 4-bit weights
    bound = (2e-3 if encoding.startswith("Q4") else 1e-4) if accurate else 0.02
    assert compare(make, n, [rows_batch(rng, count, min(n, 50))], activations=activations) < bound


@relaxed
@given(
    st.sampled_from(["BF16", "Q4_1", "Q8_0", "Q6_K"]),
    st.sampled_from(["silu", "gelu"]),
    st.sampled_from([1, 2, 9, 64, 70]),
    st.integers(1, 180),
    st.booleans(),
    st.booleans(),
    seeds,
)
def test_gated_mlp(encoding: str, activation: Any, count: int, f: int, biased: bool, mixed: bool, seed: int) -> None:
    """Gate and up of one encoding are fused with the activation; of two, they are not. F with tails."""
    rng = np.random.default_rng(seed)
    k = 256
    f = -(-f // 32) * 32 if mixed else f
    table = tensor(rng, 40, k)
    gate, up = tensor(rng, f, k, encoding, "gate"), tensor(rng, f, k, "Q4_0" if mixed else encoding, "up")
    bias = vector(rng, 2 * f) if biased else None
    down = tensor(rng, 33, f, "Q8_0" if f % 32 == 0 else "BF16", "down")

    def make(backend: Backend) -> Forward:
        embedding = backend.prepare_embedding(table, tied=False)
        both = backend.prepare_linear([gate, up], bias, pairs=True)
        last = backend.prepare_linear([down])
        return lambda ops, batch, kv: ops.linear(
            ops.glu(ops.linear(ops.take(ops.embed(embedding, batch), batch), both), activation), last
        )

    assert compare(make, 33, [rows_batch(rng, count, 33)]) < 0.02


@relaxed
@given(st.integers(5, 100), st.sampled_from([1, 2, 30, 65]), st.booleans(), seeds)
def test_norm_add_and_take_in_every_position(d: int, count: int, shared: bool, seed: int) -> None:
    """Fused where a value has one user; computed on its own where it has several, or is the wrong operand."""
    rng = np.random.default_rng(seed)
    table, square, head = tensor(rng, 30, d), tensor(rng, d, d), tensor(rng, 21, d)
    norms = [vector(rng, d, 1.0) for _ in range(3)]

    def make(backend: Backend) -> Forward:
        embedding, a, b = (backend.prepare_linear([t]) for t in (table, square, head))
        first, second, last = (backend.prepare_vector(norm, offset=0.5) for norm in norms)

        def forward(ops: Any, batch: Any, kv: Any) -> Any:
            x = ops.embed(embedding, batch, 2.0)
            y = ops.rms_norm(x, first, 1e-3)
            z = ops.add(ops.linear(y, a), x) if shared else ops.add(x, ops.linear(y, a))  # not fused, and fused
            z = ops.add(z, ops.rms_norm(ops.linear(z, a), second, 1e-3))  # a post-norm
            z = ops.add(z, y) if shared else z
            return ops.linear(ops.rms_norm(ops.take(z, batch), last, 1e-3), b)

        return forward

    assert compare(make, 21, [rows_batch(rng, count, 21)]) < 0.03


def test_encodings_may_differ_within_a_fused_matrix() -> None:
    rng = np.random.default_rng(3)
    table, d = tensor(rng, 40, 256), 256
    parts = [tensor(rng, n, d, e, e) for n, e in ((48, "Q4_K"), (16, "Q6_K"), (23, "Q5_K"))]
    bias = vector(rng, 87)

    def make(backend: Backend) -> Forward:
        embedding, matrix = backend.prepare_embedding(table, tied=False), backend.prepare_linear(parts, bias)
        assert backend.nbytes(matrix) > 0
        return lambda ops, batch, kv: ops.linear(ops.take(ops.embed(embedding, batch), batch), matrix)

    assert compare(make, 87, [rows_batch(rng, 20, 40), rows_batch(rng, 1, 40)]) < 1e-4


@pytest.mark.parametrize("encoding", [e.value for e in Encoding])
def test_a_tied_embedding_is_one_copy_that_serves_as_table_and_head(encoding: str) -> None:
    rng = np.random.default_rng(4)
    table = tensor(rng, 77, 256, encoding)

    def make(backend: Backend) -> Forward:
        both = backend.prepare_embedding(table, tied=True)
        return lambda ops, batch, kv: ops.linear(ops.take(ops.embed(both, batch), batch), both)

    assert compare(make, 77, [rows_batch(rng, 40, 77)]) < (0.01 if encoding in ("F32", "F16", "BF16") else 1e-4)


@pytest.mark.parametrize(("quantize", "bound"), [("q8", 0.02), ("q4", 0.15)])
def test_float_weights_can_be_requantized(quantize: str, bound: float) -> None:
    rng = np.random.default_rng(5)
    table, weight = tensor(rng, 40, 100), tensor(rng, 70, 100, "F32")

    def make(backend: Backend) -> Forward:
        embedding, matrix = backend.prepare_embedding(table, tied=False), backend.prepare_linear([weight])
        return lambda ops, batch, kv: ops.linear(ops.take(ops.embed(embedding, batch), batch), matrix)

    assert 1e-4 < compare(make, 70, [rows_batch(rng, 30, 40)], quantize=quantize) < bound


heads_strategy = st.builds(
    Heads,
    q=st.just(1),
    kv=st.integers(1, 2),
    dim=st.sampled_from([16, 32, 48, 64, 80, 128, 256]),
    scale=st.sampled_from([0.1, 0.25]),
    window=st.sampled_from([None, None, 1, 9, 60, 300]),
    softcap=st.sampled_from([None, None, 3.0]),
)


def attention_model(rng: np.random.Generator, heads: Heads, half: int, normed: bool) -> Any:
    """One layer of attention between an embedding and a head, with frequencies for `half` pairs of dimensions."""
    d, cols = 40, heads.q * heads.dim
    table, head = tensor(rng, 50, d), tensor(rng, 50, d)
    qkv, output = tensor(rng, heads.cols, d), tensor(rng, d, cols)
    bias, norms = vector(rng, heads.cols), [vector(rng, heads.dim, 1.0) for _ in range(2)]

    def make(backend: Backend) -> Forward:
        embedding, wo, last = (backend.prepare_linear([t]) for t in (table, output, head))
        wqkv = backend.prepare_linear([qkv], bias)
        rope = backend.prepare_rope(10.0 ** -np.linspace(0, 2, half), scale=1.1, max_len=640)
        q_norm, k_norm = (backend.prepare_vector(n) if normed else None for n in norms)

        def forward(ops: Any, batch: Any, kv: Any) -> Any:
            x = ops.embed(embedding, batch, 4.0)
            q = ops.rope_write_kv(ops.linear(x, wqkv), heads, rope, batch, kv[0], q_norm, k_norm, 1e-5)
            x = ops.add(x, ops.linear(ops.attention(q, heads, batch, kv[0]), wo))
            return ops.linear(ops.take(x, batch), last)

        return forward

    return make


@settings(deadline=None, max_examples=8)
@given(heads_strategy, st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 16]), st.floats(0.1, 1), st.booleans(), seeds)
def test_attention(heads: Heads, group: int, rotated: float, normed: bool, seed: int) -> None:
    """GQA 1 to 16, head sizes, windows, softcap, partial rotation; prompts in chunks, decoding, both in one step."""
    rng = np.random.default_rng(seed)
    heads = Heads(group * heads.kv, heads.kv, heads.dim, heads.scale, heads.window, heads.softcap)
    make = attention_model(rng, heads, max(1, int(rotated * heads.dim / 2)), normed)
    tokens = rng.integers(0, 50, 400).tolist()
    near, far = [40, 3, 77, 11], range(50, 76)
    batches = [
        make_batch([Part(0, tokens[:150], far, rows=(0, 17, 149))]),
        make_batch([Part(150, tokens[150:330], far, rows=(0, 100, 179))]),
        make_batch([Part(330, [5], far), Part(0, tokens[:37], near, rows=(0, 15, 16, 36))]),
        make_batch([Part(37, [9], near), Part(331, [6], far)]),
        make_batch([Part(38, [8], near)]),
    ]
    assert compare(make, 50, batches, [heads]) < 0.03

    one_by_one = [make_batch([Part(i, [tokens[i]], far)]) for i in range(290)]
    whole = [make_batch([Part(0, tokens[:190], far, rows=range(190))])]
    whole += [make_batch([Part(190, tokens[190:290], far, rows=range(100))])]
    backend = NumbaBackend(threads=2)
    alone, together = run(backend, make, 50, one_by_one, [heads]), run(backend, make, 50, whole, [heads])
    np.testing.assert_array_equal(np.concatenate(alone), np.concatenate(together))


def test_a_block_that_its_last_owner_left_full_of_nan_does_no_harm() -> None:
    """Hidden keys have the weight 0, and 0 * NaN is NaN: whoever takes a block over clears it."""
    rng = np.random.default_rng(6)
    heads = Heads(4, 2, 32, 0.2)
    make = attention_model(rng, heads, 16, normed=False)
    backend = NumbaBackend(threads=2)
    batches = [make_batch([Part(0, [3] * 40, [7, 8, 9], rows=(39,))]), make_batch([Part(40, [4], [7, 8, 9])])]
    clean = run(backend, make, 50, batches, [heads])

    def poisoned(backend: Backend) -> Forward:
        forward = make(backend)

        def record(ops: Any, batch: Any, kv: Any) -> Any:
            kv[0].words[:] = 0x7FC0  # NaN
            return forward(ops, batch, kv)

        return record

    for a, b in zip(run(backend, poisoned, 50, batches, [heads]), clean, strict=True):
        np.testing.assert_array_equal(a, b)


def test_blocks_are_copied_before_anything_is_computed() -> None:
    rng = np.random.default_rng(7)
    heads = Heads(4, 2, 32, 0.2)
    make = attention_model(rng, heads, 16, normed=False)
    prompt = make_batch([Part(0, list(range(20)), [5, 6])])
    straight = make_batch([Part(20, [9], [5, 6])])
    forked = make_batch([Part(20, [9], [5, 17])], copies=[(6, 17)])
    a = run(NumbaBackend(threads=1), make, 50, [prompt, straight], [heads])
    b = run(NumbaBackend(threads=1), make, 50, [prompt, forked], [heads])
    np.testing.assert_array_equal(a[1], b[1])


@pytest.mark.parametrize(
    ("heads", "what"),
    [(Heads(2, 1, 20, 1.0), "head dimension 20"), (Heads(17, 1, 16, 1.0), "17 query heads per kv head")],
)
def test_shapes_beyond_the_kernels_are_refused(heads: Heads, what: str) -> None:
    make = attention_model(np.random.default_rng(0), heads, 8, normed=False)
    with pytest.raises(BackendError, match=what):
        run(NumbaBackend(threads=1), make, 50, [], [heads])
