"""Sampling fields, from a request to its tokens: a real (tiny, random) model under the engine.

The oracle computes every token anew: one pass over all known tokens, then the rule that the field's documentation
gives, in plain arithmetic, without seats, batches, chunks or caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.engines import PROMPT, Records, run, submission, tiny
from tests.helpers import Part, make_batch

LENGTH = 24
Next = Callable[[np.ndarray, Sequence[int]], int]  # raw logits, output so far -> the next token


@pytest.fixture(scope="module")
def logits_after() -> Callable[[Sequence[int]], np.ndarray]:
    program = tiny(max_num_batched_tokens=64).engine.runner.program

    def last_row(tokens: Sequence[int]) -> np.ndarray:
        batch = make_batch([Part(0, tokens, range(16))], block_size=4)
        row: np.ndarray = program.logits(batch)[-1]
        return row.astype(np.float64)

    return last_row


def alone(logits_after: Callable[[Sequence[int]], np.ndarray], choose: Next) -> list[int]:
    output: list[int] = []
    while len(output) < LENGTH:
        output.append(choose(logits_after([*PROMPT, *output]), output))
    return output


def penalized(presence: float, frequency: float, repetition: float) -> Next:
    """OpenAI's definition of the first two (over the output), that of Keskar et al. 2019 of the third (over all)."""

    def choose(row: np.ndarray, output: Sequence[int]) -> int:
        for token in {*PROMPT, *output}:
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        for token in set(output):
            row[token] -= presence + frequency * output.count(token)
        return int(np.argmax(row))

    return choose


# bug: 19, 39
@pytest.mark.parametrize(
    "penalties", [(0.0, 0.0, 1.3), (1.5, 0.0, 1.0), (0.0, 0.4, 1.0), (-1.0, -0.3, 1.0), (0.5, 0.2, 1.2)]
)
def test_penalties_follow_their_definition_whatever_happens_to_the_request(
    penalties: tuple[float, float, float], logits_after: Callable[[Sequence[int]], np.ndarray]
) -> None:
    presence, frequency, repetition = penalties
    expected = alone(logits_after, penalized(*penalties))
    fields: dict[str, Any] = {
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "repetition_penalty": repetition,
    }
    wanted = submission(PROMPT, "wanted", max_tokens=LENGTH, ignore_eos=True, **fields)
    assert run(tiny().engine, wanted).tokens["wanted", 0] == expected

    records = Records()
    crowded = tiny(num_blocks=20, max_num_batched_tokens=9, observers=[records]).engine
    mates = [submission([i, *PROMPT], f"m{i}", max_tokens=20, temperature=1.0, seed=i, **fields) for i in range(3)]
    got = run(crowded, *mates[:2], wanted, mates[2])
    assert sum(step.preempted for step in records.steps) > 0
    assert got.tokens["wanted", 0] == expected


def test_penalties_change_what_is_said() -> None:
    plain = run(tiny().engine, submission(PROMPT, max_tokens=LENGTH)).tokens["r", 0]
    fields: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.0},
    ]
    changed = [run(tiny().engine, submission(PROMPT, max_tokens=LENGTH, **each)).tokens["r", 0] for each in fields]
    assert plain not in changed
    assert all(len(set(tokens)) >= len(set(plain)) for tokens in changed)


def test_bias_and_lists_of_ids_follow_their_definition(
    logits_after: Callable[[Sequence[int]], np.ndarray],
) -> None:
    plain = run(tiny().engine, submission(PROMPT, max_tokens=LENGTH, ignore_eos=True)).tokens["r", 0]
    bias = {plain[0]: -100.0, plain[3]: -1.5, 65: 2.0}
    banned = frozenset(plain[:6])
    allowed = frozenset(range(97, 123))

    def biased(row: np.ndarray, _: Sequence[int]) -> int:
        for token, value in bias.items():
            row[token] += value
        return int(np.argmax(row))

    def without(row: np.ndarray, _: Sequence[int]) -> int:
        row[list(banned)] = -np.inf
        return int(np.argmax(row))

    def only(row: np.ndarray, _: Sequence[int]) -> int:
        return max(allowed - banned, key=lambda token: row[token])

    wanted: dict[str, tuple[Next, dict[str, Any]]] = {
        "bias": (biased, {"logit_bias": bias}),
        "banned": (without, {"banned_token_ids": banned}),
        "both": (only, {"banned_token_ids": banned, "allowed_token_ids": allowed}),
    }
    together = [submission(PROMPT, name, max_tokens=LENGTH, ignore_eos=True, **f) for name, (_, f) in wanted.items()]
    got = run(tiny(max_num_batched_tokens=8).engine, *together, submission(PROMPT, max_tokens=LENGTH, ignore_eos=True))
    for name, (choose, _) in wanted.items():
        assert got.tokens[name, 0] == alone(logits_after, choose), name
    assert got.tokens["r", 0] == plain


def test_no_end_token_comes_before_min_tokens() -> None:
    plain = run(tiny().engine, submission(PROMPT, max_tokens=LENGTH, ignore_eos=True)).tokens["r", 0]
    ends = frozenset(plain[:4])
    early = run(tiny().engine, submission(PROMPT, max_tokens=LENGTH, stop_token_ids=ends))
    assert len(early.tokens["r", 0]) == 1
    late = run(tiny().engine, submission(PROMPT, max_tokens=LENGTH, stop_token_ids=ends, min_tokens=5))
    assert len(late.tokens["r", 0]) >= 5
    assert ends.isdisjoint(late.tokens["r", 0][:5])
