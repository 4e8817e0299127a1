"""Penalties: what they count, by seat, and that it survives a preemption."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minserve.backend.sampling import Seats
from tests.backend.rows import reset, tokens
from tests.helpers import allow


def test_repetition_counts_prompt_and_output_and_pushes_either_sign_down() -> None:
    seats = Seats(4)
    seats.reset(reset(0, [0], [1]))
    logits = [[4.0, -1.0, 1.9, -1.5]]
    assert tokens(logits, seats, seats=0, penalties=(0, 0, 2)) == [0]  # 4 / 2 still beats 1.9
    assert tokens(logits, seats, seats=0, penalties=(0, 0, 2.2)) == [2]  # 1.82 does not
    only_seen = allow(4, [1, 3])
    assert tokens(logits, seats, seats=0, penalties=(0, 0, 1.4), mask=only_seen) == [1]  # -1.4
    assert tokens(logits, seats, seats=0, penalties=(0, 0, 1.6), mask=only_seen) == [3]  # -1.6


# bug: 39
def test_presence_and_frequency_count_the_output_only() -> None:
    seats = Seats(4)
    seats.reset(reset(0, [0, 0, 0], [1, 1, 2]))
    assert tokens([[1, 1.1, 1.2, 0]], seats, seats=0, penalties=(0.5, 0, 1)) == [0]
    assert tokens([[0, 3.0, 2.5, 0]], seats, seats=0, penalties=(0, 0.6, 1)) == [2]  # 3 - 1.2 < 2.5 - 0.6
    assert tokens([[0, 3.0, 2.5, 0]], seats, seats=0, penalties=(5, 0, 1)) == [3]  # 0 was drawn above


# bug: 39
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_penalties_leave_batch_mates_alone(order: list[int]) -> None:
    """One penalized row among a greedy and a sampled one, long and short histories, in every order."""
    rows = np.sin(np.arange(60)).reshape(3, 20) * 3
    fields: dict[str, list[Any]] = {
        "penalties": [(0, 0, 1), (1.5, 0.5, 1.8), (0, 0, 1)],
        "temperature": [0.0, 0.8, 1.2],
        "uniforms": [0.1, 0.6, 0.9],
        "seats": [4, 2, -1],
    }

    def seats() -> Seats:
        s = Seats(20)
        s.reset(reset(2, list(range(10)) * 30, [3, 3, 5]))
        s.reset(reset(4, [1], [2] * 50))
        return s

    alone = [tokens([rows[i]], seats(), **{k: [v[i]] for k, v in fields.items()})[0] for i in range(3)]
    together = tokens(rows[order], seats(), **{k: [v[i] for i in order] for k, v in fields.items()})
    assert together == [alone[i] for i in order]


def test_counts_grow_with_drawn_tokens_and_equal_a_rebuilt_seat() -> None:
    """Twelve steps with counts kept, against counts rebuilt before every step as after a preemption."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(12, 1, 8)) + 2
    fields: dict[str, Any] = {"seats": 3, "temperature": 0.5, "penalties": (0.4, 0.7, 1.3)}
    kept = Seats(8)
    output: list[int] = []
    kept.reset(reset(3, [0, 1], []))
    for i, row in enumerate(rows):
        rebuilt = Seats(8)
        rebuilt.reset(reset(3, [0, 1], output))
        drawn = tokens(row, kept, uniforms=i / 12, **fields)
        assert drawn == tokens(row, rebuilt, uniforms=i / 12, **fields)
        output += drawn
    assert len(set(output)) > 3


def test_scored_rows_and_rows_without_a_token_are_not_counted() -> None:
    seats = Seats(3)
    seats.reset(reset(0, [], []))
    tokens([[9, 0, 0], [-np.inf] * 3], seats, seats=0, targets=[0, -1])
    assert tokens([[1, 0.5, 0]], seats, seats=0, penalties=(1, 1, 1)) == [0]
    assert tokens([[1, 0.5, 0]], seats, seats=0, penalties=(1, 1, 1)) == [1]
