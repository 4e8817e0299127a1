"""Perplexity through the engine equals the definition, computed from a whole pass's logits."""

from __future__ import annotations

import numpy as np
import pytest

from minserve.bench.perplexity import perplexity, windows
from minserve.runner import Runner
from tests.engines import tiny
from tests.helpers import Part, make_batch

TOKENS = np.random.default_rng(1).integers(0, 256, 150).tolist()


def nll(runner: Runner, window: tuple[int, ...]) -> list[float]:
    """Of the tokens in the second half, from the logits of one pass over the window."""
    part = Part(0, window, range(len(window) // 4), rows=range(len(window)))
    logits = runner.program.logits(make_batch([part], block_size=4)).astype(np.float64)
    best = logits.max(axis=1, keepdims=True)
    log = logits - best - np.log(np.exp(logits - best).sum(axis=1, keepdims=True))
    return [-float(log[i - 1, window[i]]) for i in range(len(window) // 2 + 1, len(window))]


@pytest.mark.parametrize("step_tokens", [7, 64])
def test_it_is_the_mean_over_the_second_halves_of_whole_windows(step_tokens: int) -> None:
    engine = tiny(max_num_batched_tokens=step_tokens).engine
    found = perplexity(engine, TOKENS, 64)
    whole = tiny(max_num_batched_tokens=64).engine.runner
    expected = nll(whole, tuple(TOKENS[:64])) + nll(whole, tuple(TOKENS[64:128]))
    assert found.tokens == len(expected) == 2 * 31
    assert found.value == pytest.approx(np.exp(np.mean(expected)), rel=1e-5)


def test_every_window_begins_with_the_beginning_of_text_token() -> None:
    assert windows([1, 2, 3, 4, 5, 6, 7], 3, 0) == [(0, 2, 3), (0, 5, 6)]
    assert windows([1, 2, 3, 4, 5, 6], 3, None) == [(1, 2, 3), (4, 5, 6)]


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="has 150 tokens, fewer than one window of 151"):
        perplexity(tiny().engine, TOKENS, 151)
