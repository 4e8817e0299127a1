"""Which token is drawn: every step against a plain implementation that sorts everything, and its edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minserve.backend.sampling import Seats, sample
from tests.backend.rows import NO_SEATS, reset, sample_rows, tokens
from tests.helpers import allow, make_sampling


def reachable(logits: list[float], **fields: Any) -> set[int]:
    """The tokens that some uniform number draws."""
    grid = np.arange(2048) / 2048
    return set(tokens([logits] * len(grid), uniforms=grid, **fields))


def plain_probabilities(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[list[float], float]:
    """Steps 4 to 7 on Python floats, and how near a probability came to a boundary where rounding decides."""
    values = [(x - max(logits)) / temperature for x in logits]
    if 0 < top_k < len(values):
        values = [v if v >= sorted(values)[-top_k] else -np.inf for v in values]
    weights = [float(np.exp(v)) for v in values]
    near = [1.0]
    if top_p < 1:
        levels = sorted({w for w in weights if w > 0}, reverse=True)
        shares = [sum(w for w in weights if w >= level) / sum(weights) for level in levels]
        near += [abs(share - top_p) for share in shares]
        threshold = next((level for level, share in zip(levels, shares, strict=True) if share >= top_p), levels[-1])
        weights = [w if w >= threshold else 0.0 for w in weights]
    near += [abs(w - min_p) for w in weights]
    weights = [w if w >= min_p else 0.0 for w in weights]
    return [w / sum(weights) for w in weights], min(near)


@settings(max_examples=300)
@given(
    logits=st.lists(st.integers(-12, 12), min_size=1, max_size=200),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5, 3.0]),
    top_k=st.integers(-1, 210),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.2, 0.97]),
    uniform=st.integers(0, (1 << 24) - 1),
)
def test_draw_equals_a_plain_implementation(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, uniform: int
) -> None:
    probabilities, nearest = plain_probabilities(logits, temperature, top_k, top_p, min_p)
    cumulative = np.cumsum(probabilities)
    u = uniform / (1 << 24)
    assume(nearest > 1e-5)
    assume(np.abs(cumulative - u).min() > 1e-5)
    expected = int(np.searchsorted(cumulative, u, side="right"))
    fields: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "uniforms": u}
    assert tokens(logits, **fields) == [expected]


def test_draws_have_the_softmaxs_frequencies() -> None:
    probabilities = np.array([0.5, 0.25, 0.125, 0.125])
    grid = (np.arange(8000) + 0.5) / 8000
    drawn = tokens(np.tile(np.log(probabilities), (8000, 1)), temperature=1.0, uniforms=grid)
    np.testing.assert_allclose(np.bincount(drawn) / 8000, probabilities, atol=2e-4)


def test_temperature_zero_is_the_largest_logit_and_the_lowest_id_among_equals() -> None:
    assert tokens([[0, 3, 1, 3], [2, 2, 2, 2], [-5, -4, -6, -9]], uniforms=0.99) == [1, 0, 1]


def test_tiny_temperature_is_greedy_without_overflow() -> None:
    assert reachable([1.0, 1.0001, -50.0], temperature=1e-38) == {1}


def test_ties_stay_together() -> None:
    assert reachable([1, 3, 3, 0], temperature=1.0, top_k=1) == {1, 2}
    assert reachable([1, 3, 3, 3, 0], temperature=1.0, top_p=0.4) == {1, 2, 3}
    assert reachable([1, 3, 3, 0], temperature=1.0, top_p=0.0) == {1, 2}


def test_top_p_zero_keeps_the_best_only() -> None:
    assert reachable([1, 3, 2.9], temperature=2.0, top_p=0.0) == {1}


def test_min_p_one_keeps_the_best_only() -> None:
    assert reachable([1, 3, 2.9], temperature=2.0, min_p=1.0) == {1}


def test_nucleus_of_a_flat_distribution_is_found_beyond_the_first_candidates() -> None:
    """7,000 slightly different logits: a nucleus of about 0.9 * 7000 tokens, far more than are looked at first."""
    logits = np.linspace(0, 0.01, 7000)
    grid = np.arange(512) / 512
    drawn = tokens(np.tile(logits, (512, 1)), temperature=1.0, top_p=0.9, uniforms=grid)
    weights = np.exp(np.sort(logits)[::-1])
    first = 7000 - int(np.searchsorted(np.cumsum(weights), 0.9 * weights.sum())) - 1
    assert abs(min(drawn) - first) <= 1
    assert max(drawn) > 6950


# bug: 34
def test_any_top_k_is_fine_beside_greedy_rows() -> None:
    vocab = 50
    row = np.sin(np.arange(vocab))
    top_k = [9999999, vocab, vocab + 1, 1, 0, -1, 0]
    temperature = [1.0] * 6 + [0.0]
    mixed = tokens([row] * 7, top_k=top_k, temperature=temperature, uniforms=0.7)
    off = tokens([row], temperature=1.0, uniforms=0.7)[0]
    best = int(row.argmax())
    assert mixed == [off, off, off, best, off, off, best]


# bug: 36
@pytest.mark.parametrize("bad", [[-np.inf] * 4, [0, np.nan, 1, 2], [np.inf, 0, 0, 0], [np.nan] * 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_without_a_finite_maximum_gives_no_token_and_spares_its_mates(bad: list[float], temperature: float) -> None:
    fine = [0.0, 5.0, 1.0, 2.0]
    result = sample_rows([fine, bad, fine], temperature=temperature, logprobs=2, uniforms=0.3)
    alone = sample_rows([fine], temperature=temperature, logprobs=2, uniforms=0.3)
    assert result.tokens.tolist() == [alone.tokens[0], -1, alone.tokens[0]]
    assert result.logprobs == (alone.logprobs[0], None, alone.logprobs[0])


# bug: 36
def test_mask_that_allows_nothing_or_only_minus_infinity_gives_no_token() -> None:
    logits = [[1, 2, 3, -np.inf]] * 3
    assert tokens(logits, mask=allow(4, [], [3], [0, 3])) == [-1, -1, 0]


def test_masked_nan_is_not_looked_at() -> None:
    assert tokens([[np.nan, 2, 3]], mask=allow(3, [1, 2])) == [2]


def test_mask_and_bias_hold_across_words_of_32_tokens() -> None:
    vocab = 70
    logits = np.zeros((3, vocab))
    mask = allow(vocab, [31, 32, 69], None, [63, 64])
    bias = [{69: 1.0}, {40: 0.5, 69: 0.25}, {69: 100.0}]
    assert tokens(logits, mask=mask, bias=bias) == [69, 40, 63]
    assert reachable([0.0] * vocab, temperature=1.0, mask=np.repeat(allow(vocab, [31, 32, 69]), 2048, 0)) == {
        31,
        32,
        69,
    }


def test_bias_is_added_after_penalties_and_cannot_unmask() -> None:
    assert tokens([[0, 1, 2]], bias=[{0: 50.0, 1: 10.0}], mask=allow(3, [1, 2])) == [1]


# bug: 12, 37
@pytest.mark.parametrize("token", [-1, 8, 99999999])
def test_ids_outside_the_vocabulary_are_an_error_and_touch_nothing(token: int) -> None:
    seats = Seats(8)
    seats.reset(reset(0, [1], []))
    logits = np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match=r"bias_ids must lie in 0\.\.7"):
        sample(logits, make_sampling(2, bias=[{}, {token: 1.0}], seats=[0, -1]), seats)
    with pytest.raises(ValueError, match=r"targets must lie in -1\.\.7"):
        sample(logits, make_sampling(2, targets=[-1, token if token > 0 else -2], seats=[0, -1]), seats)
    assert not logits.any()
    assert tokens([[0, 0.5] + [0] * 6], seats, seats=0, penalties=(1, 1, 1)) == [1]  # nothing was counted


# bug: 12
def test_mask_of_another_vocabulary_is_an_error() -> None:
    with pytest.raises(ValueError, match="mask has 3 words a row, 64 tokens need 2"):
        tokens(np.zeros((1, 64)), mask=allow(65, None))


# bug: 81
def test_half_precision_logits_are_sampled_in_float32() -> None:
    """Differences below half precision's steps matter after a division: 1000 + 0.3 must not collapse."""
    half: Any = np.array([[1000.0, 999.5, 998.0]], np.float16)
    fields: dict[str, Any] = {"temperature": 0.9, "uniforms": 0.7, "bias": [{1: 0.3}], "logprobs": 1}
    low = sample(half, make_sampling(1, **fields), NO_SEATS)
    high = sample(half.astype(np.float32), make_sampling(1, **fields), NO_SEATS)
    assert low.tokens.tolist() == high.tokens.tolist()
    assert low.logprobs == high.logprobs


def test_no_rows_no_tokens() -> None:
    result = sample(np.zeros((0, 5), np.float32), make_sampling(0), NO_SEATS)
    assert result.tokens.shape == (0,)
    assert result.logprobs == ()
