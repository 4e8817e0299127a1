"""Log probabilities: of the raw row, whatever moved the draw."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from minserve.backend.sampling import Seats
from tests.backend.rows import reset, sample_rows
from tests.helpers import allow


def test_logprobs_are_of_the_raw_row() -> None:
    """Temperature, filters, bias, mask and penalties move the draw, never the reported probabilities."""
    seats = Seats(4)
    seats.reset(reset(0, [], [1]))
    logits = np.log([0.1, 0.4, 0.2, 0.3])
    fields: dict[str, Any] = {"temperature": 0.1, "top_k": 1, "min_p": 0.5, "penalties": (2, 2, 2), "seats": 0}
    result = sample_rows(logits, seats, logprobs=3, bias=[{0: 9.0}], mask=allow(4, [0, 1]), **fields)
    (described,) = result.logprobs
    assert described is not None
    assert described.token_id == result.tokens[0] == 0
    assert described.logprob == pytest.approx(np.log(0.1), abs=1e-6)
    assert [token for token, _ in described.top] == [1, 3, 2]
    assert [value for _, value in described.top] == pytest.approx(np.log([0.4, 0.3, 0.2]), abs=1e-6)


def test_best_logprobs_break_ties_by_id_and_stop_at_the_vocabulary() -> None:
    described = sample_rows([[1, 2, 2, 2, 0]], logprobs=2).logprobs[0]
    assert described is not None
    assert [token for token, _ in described.top] == [1, 2]
    described = sample_rows([[1, 2, 2, 2, 0]], logprobs=99).logprobs[0]
    assert described is not None
    assert [token for token, _ in described.top] == [1, 2, 3, 0, 4]
    assert sample_rows([[1, 2]], logprobs=0).logprobs[0] is not None
    assert sample_rows([[1, 2]], logprobs=-1).logprobs == (None,)


def test_logprobs_fit_into_json() -> None:
    rows = [[0, -np.inf, -20000.0], [np.nan] * 3, [np.inf, 0, 0]]
    result = sample_rows(rows, logprobs=3, targets=1)
    for described in result.logprobs:
        assert described is not None
        text = json.dumps([described.logprob, *(value for _, value in described.top)], allow_nan=False)
        assert min(json.loads(text)) == -9999.0


def test_scored_rows_report_their_target_and_draw_nothing() -> None:
    result = sample_rows(np.log([[0.25, 0.75], [0.5, 0.5]]), targets=[0, 1], logprobs=[1, -1])
    assert result.tokens.tolist() == [0, 1]
    first, second = result.logprobs
    assert first is not None
    assert second is not None
    assert (first.token_id, second.token_id) == (0, 1)
    assert first.logprob == pytest.approx(np.log(0.25), abs=1e-6)
    assert first.top[0][0] == 1
    assert second.top == ()
