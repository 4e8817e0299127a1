"""A plan laid out as arrays, checked by hand. Blocks have 4 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from minserve.batch import Batch, uniform
from minserve.batch_build import build_batch
from minserve.request import Chunk, Pool, Request, SamplingParams, StepPlan

VOCAB = 40


def request(name: str, tokens: Sequence[int], *, prompt_len: int | None = None, **fields: Any) -> Request:
    params = fields.pop("params", {})
    defaults: dict[str, Any] = {"choice": 0, "seed": 7, "blocks": [], "seat": 0}
    return Request(
        id=name,
        group=name,
        pool=Pool.INTERACTIVE,
        priority=0,
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        tokens=list(tokens),
        params=SamplingParams(**({"max_tokens": 9, "temperature": 0.0} | params)),
        arrival=0.0,
        **(defaults | fields),
    )


def build(
    chunks: Sequence[Chunk],
    *requests: Request,
    admitted: Sequence[str] = (),
    copies: Sequence[tuple[int, int]] = (),
    vocab_size: int = VOCAB,
) -> Batch:
    plan = StepPlan(3, tuple(chunks), admitted=tuple(admitted))
    return build_batch(plan, {r.id: r for r in requests}, block_size=4, vocab_size=vocab_size, copies=copies)


def one_row(**params: Any) -> Batch:
    """A single decoding request with two output tokens."""
    return build([Chunk("r", 4, 1, 1)], request("r", range(5), prompt_len=3, blocks=[0, 1], params=params))


def bits(mask: npt.NDArray[np.uint32]) -> set[int]:
    """Allowed tokens of a mask's row, stray bits beyond the vocabulary included."""
    return {32 * word + bit for word, value in enumerate(mask.tolist()) for bit in range(32) if value >> bit & 1}


def test_tokens_positions_slots_and_tables_of_a_mixed_step() -> None:
    reading = request("reading", range(100, 120), blocks=[5, 2, 9], seat=4)
    talking = request("talking", range(7), prompt_len=5, blocks=[7, 1], seat=2)
    batch = build([Chunk("talking", 6, 1, 1), Chunk("reading", 6, 5, 0)], reading, talking, copies=[(1, 8), (2, 6)])
    assert batch.step == 3
    assert batch.token_ids.tolist() == [6, 106, 107, 108, 109, 110]
    assert batch.positions.tolist() == [6, 6, 7, 8, 9, 10]
    assert batch.slots.tolist() == [1 * 4 + 2, 2 * 4 + 2, 2 * 4 + 3, 9 * 4, 9 * 4 + 1, 9 * 4 + 2]
    assert batch.query_starts.tolist() == [0, 1, 6]
    assert batch.context_lens.tolist() == [7, 11]
    assert batch.block_tables.tolist() == [[7, 1, 0], [5, 2, 9]]
    assert batch.seats.tolist() == [2, 4]
    assert batch.logit_rows.tolist() == [0]
    assert batch.copies.tolist() == [[1, 8], [2, 6]]
    assert (batch.num_tokens, batch.num_requests, batch.num_rows) == (6, 2, 1)


def test_all_arrays_have_the_dtypes_of_the_contract() -> None:
    batch = one_row(temperature=1.0, logit_bias={3: 1.5}, banned_token_ids=frozenset({1}))
    floats = {"temperature", "top_p", "min_p", "uniforms", "penalties", "bias_values"}
    for source in (batch, batch.sampling):
        for name in source.__slots__:
            value = getattr(source, name)
            if isinstance(value, np.ndarray):
                others = {"mask": np.uint32, "generated": np.bool_}
                expected = others.get(name, np.float32 if name in floats else np.int32)
                assert value.dtype == expected, name
                assert value.flags.c_contiguous, name


def test_generated_tokens_are_told_from_those_of_a_prompt() -> None:
    """Also when they are computed again after a preemption, and where drafts follow them."""
    prompt, again = request("prompt", [1, 2, 3], blocks=[0], seat=0), request("again", [4, 5, 6, 7], prompt_len=2)
    new = request("new", [8, 9], prompt_len=1, blocks=[1], seat=1)
    again.blocks, again.seat = [2, 3], 2
    chunks = [Chunk("prompt", 2, 1, 1), Chunk("again", 2, 2, 1), Chunk("new", 1, 3, 3, draft=(1, 2))]
    assert build(chunks, prompt, again, new).generated.tolist() == [False, True, True]
    assert build([Chunk("again", 0, 2, 0)], again).generated.tolist() == [False]


def test_a_plan_without_chunks_is_an_empty_batch() -> None:
    batch = build([])
    assert (batch.num_tokens, batch.num_requests, batch.num_rows) == (0, 0, 0)
    assert batch.query_starts.tolist() == [0]
    assert (batch.copies.shape, batch.sampling.penalties.shape, batch.sampling.mask) == ((0, 2), (0, 3), None)


def test_rows_come_as_scored_sampled_forks() -> None:
    leader = request("r#0", range(10, 16), blocks=[0, 1], params={"prompt_logprobs": 2, "logprobs": 1})
    fork = request("r#1", range(10, 16), blocks=[0, 2], seat=1, choice=1, params={"temperature": 1.0, "top_k": 5})
    chunk = Chunk("r#0", 2, 4, 1, scored=3, forks=("r#1",))
    sampling = build([chunk], leader, fork).sampling
    assert build([chunk], leader, fork).logit_rows.tolist() == [0, 1, 2, 3, 3]
    assert sampling.targets.tolist() == [13, 14, 15, -1, -1]
    assert sampling.logprobs.tolist() == [2, 2, 2, 1, -1]
    assert sampling.temperature.tolist() == [0, 0, 0, 0, 1]
    assert sampling.top_k.tolist() == [0, 0, 0, 0, 5]
    assert sampling.uniforms.tolist() == [0, 0, 0, 0, np.float32(uniform(7, 1, 0))]


def test_rows_scored_before_a_preemption_are_left_out() -> None:
    again = request("r", range(10, 16), blocks=[0, 1], scored=3, params={"prompt_logprobs": 0})
    batch = build([Chunk("r", 0, 6, 1, scored=2)], again)
    assert batch.logit_rows.tolist() == [3, 4, 5]
    assert batch.sampling.targets.tolist() == [14, 15, -1]


def test_drafts_are_computed_behind_the_known_tokens_and_every_row_is_sampled() -> None:
    r = request("r", range(6), prompt_len=4, blocks=[0, 1, 2], params={"temperature": 1.0})
    batch = build([Chunk("r", 5, 4, 4, draft=(30, 31, 32))], r)
    assert batch.token_ids.tolist() == [5, 30, 31, 32]
    assert batch.logit_rows.tolist() == [0, 1, 2, 3]
    assert batch.sampling.uniforms.tolist() == [np.float32(uniform(7, 0, index)) for index in (2, 3, 4, 5)]


def test_each_row_has_the_parameters_of_its_request() -> None:
    params = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "logprobs": 4}
    a = request("a", range(5), prompt_len=3, blocks=[0, 1], params=params)
    b = request("b", range(5), prompt_len=3, blocks=[2, 3], seed=8)
    s = build([Chunk("a", 4, 1, 1), Chunk("b", 4, 1, 1)], a, b).sampling
    rows = zip(s.temperature, s.top_p, s.top_k, s.min_p, s.logprobs, s.uniforms, strict=True)
    assert [tuple(float(value) for value in row) for row in rows] == [
        pytest.approx((0.5, 0.9, 3, 0.1, 4, uniform(7, 0, 2))),
        pytest.approx((0.0, 1.0, 0, 0.0, -1, 0.0)),
    ]


# -- penalties and seats


def test_only_penalized_rows_name_a_seat() -> None:
    params = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}
    a = request("a", range(5), prompt_len=3, blocks=[0, 1], seat=6, params=params)
    b = request("b", range(5), prompt_len=3, blocks=[2, 3], seat=5)
    sampling = build([Chunk("a", 4, 1, 1), Chunk("b", 4, 1, 1)], a, b).sampling
    assert sampling.seats.tolist() == [6, -1]
    assert sampling.penalties.tolist() == [[0.5, 0.25, 1.5], [0, 0, 1]]


def test_the_seats_of_admitted_penalized_requests_are_rebuilt() -> None:  # bug: 19
    """New, back after preemption with output, and forked."""
    params = {"frequency_penalty": 0.5}
    new = request("new", [1, 2, 3], blocks=[0], seat=0, params=params)
    back = request("back", [4, 5, 6, 7, 8], prompt_len=3, blocks=[1, 2], seat=1, params=params)
    fork = request("fork", [1, 2, 3], blocks=[3], seat=2, choice=1, params=params)
    plain = request("plain", [9], blocks=[4], seat=3)
    going_on = request("on", [1, 2], prompt_len=1, blocks=[5], seat=4, params=params)
    chunks = [Chunk("new", 0, 3, 1, forks=("fork",)), Chunk("back", 0, 5, 1), Chunk("plain", 0, 1, 1)]
    batch = build(
        [*chunks, Chunk("on", 1, 1, 1)],
        *(new, back, fork, plain, going_on),
        admitted=["new", "back", "plain", "fork"],
    )
    assert [(r.seat, r.prompt.tolist(), r.output.tolist()) for r in batch.resets] == [
        (0, [1, 2, 3], []),
        (1, [4, 5, 6], [7, 8]),
        (2, [1, 2, 3], []),
    ]
    assert all(r.prompt.dtype == r.output.dtype == np.int32 for r in batch.resets)


# -- masks and bias


def test_nobody_pays_for_a_mask_that_nobody_needs() -> None:
    assert one_row(stop_token_ids=frozenset({3}), min_tokens=2).sampling.mask is None


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"allowed_token_ids": frozenset({3, 5, 39})}, {3, 5, 39}),
        ({"banned_token_ids": frozenset({0, 33})}, set(range(VOCAB)) - {0, 33}),
        ({"allowed_token_ids": frozenset({3, 5}), "banned_token_ids": frozenset({5})}, {3}),
        ({"allowed_token_ids": frozenset({5}), "banned_token_ids": frozenset({5})}, set()),
        ({"stop_token_ids": frozenset({4, 9}), "min_tokens": 3}, set(range(VOCAB)) - {4, 9}),
        (
            {"stop_token_ids": frozenset({4}), "banned_token_ids": frozenset({1}), "min_tokens": 2},
            set(range(VOCAB)) - {1},
        ),
    ],
)
def test_a_mask_has_a_bit_for_every_allowed_token(params: dict[str, Any], allowed: set[int]) -> None:
    mask = one_row(**params).sampling.mask
    assert mask is not None
    assert mask.shape == (1, 2)
    assert bits(mask[0]) == allowed


@pytest.mark.parametrize("beyond", [-1, VOCAB, VOCAB + 3, 63, 64, 2**40])
def test_ids_outside_the_vocabulary_touch_nobodys_bits(beyond: int) -> None:  # bug: 12
    stops = frozenset({4, beyond})
    strange = request("a", range(5), prompt_len=3, blocks=[0, 1], params={"stop_token_ids": stops, "min_tokens": 5})
    mate = request("b", range(5), prompt_len=3, blocks=[2, 3])
    mask = build([Chunk("a", 4, 1, 1), Chunk("b", 4, 1, 1)], strange, mate).sampling.mask
    assert mask is not None
    assert [bits(row) for row in mask] == [set(range(VOCAB)) - {4}, set(range(VOCAB))]
    allowed = one_row(allowed_token_ids=frozenset({7, beyond})).sampling.mask
    assert allowed is not None
    assert bits(allowed[0]) == {7}


def test_a_stop_token_is_banned_until_min_tokens_in_every_draft_row() -> None:
    r = request(
        "r",
        range(6),
        prompt_len=4,
        blocks=[0, 1, 2],
        params={"stop_token_ids": frozenset({4}), "min_tokens": 4},
    )
    mask = build([Chunk("r", 5, 4, 4, draft=(30, 31, 32))], r).sampling.mask
    assert mask is not None
    assert [4 in bits(row) for row in mask] == [False, False, True, True], "outputs 2, 3, 4, 5"


def test_scored_rows_are_raw() -> None:
    params = {
        "prompt_logprobs": 0,
        "temperature": 1.0,
        "presence_penalty": 1.0,
        "logit_bias": {1: 2.0},
        "banned_token_ids": frozenset({2}),
    }
    r = request("r", range(10, 14), blocks=[0], params=params)
    sampling = build([Chunk("r", 0, 4, 1, scored=3)], r, admitted=["r"]).sampling
    assert sampling.mask is not None
    assert [len(bits(row)) for row in sampling.mask] == [VOCAB, VOCAB, VOCAB, VOCAB - 1]
    assert sampling.bias_starts.tolist() == [0, 0, 0, 0, 1]
    assert sampling.penalties[:, 0].tolist() == [0, 0, 0, 1]
    assert sampling.seats.tolist() == [-1, -1, -1, 0]
    assert sampling.temperature.tolist() == [0, 0, 0, 1]


def test_bias_is_listed_row_by_row() -> None:
    a = request("a", range(5), prompt_len=3, blocks=[0, 1], params={"logit_bias": {7: 1.0, 2: -100.0}})
    b = request("b", range(5), prompt_len=3, blocks=[2, 3])
    c = request("c", range(5), prompt_len=3, blocks=[4, 5], params={"logit_bias": {9: 0.5}})
    s = build([Chunk(name, 4, 1, 1) for name in "abc"], a, b, c).sampling
    assert s.bias_starts.tolist() == [0, 2, 2, 3]
    assert list(zip(s.bias_ids.tolist(), s.bias_values.tolist(), strict=True)) == [(7, 1.0), (2, -100.0), (9, 0.5)]
