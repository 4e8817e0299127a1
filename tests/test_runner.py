"""Rows of a step go back to the chunks they came from; drafts are accepted as far as they agree."""

from typing import Any

import numpy as np
import pytest

from minserve.backend.base import KVSpec, ModelSpec, Peaks
from minserve.batch import Sampled
from minserve.request import Chunk, StepPlan, TokenLogprob
from minserve.runner import Runner

SPEC = ModelSpec("test", 100, 64, (KVSpec(1, 4),), weight_bytes=1000, flops_per_token=10, head_flops=5)


class Program:
    def __init__(self, tokens: list[int], logprobs: list[TokenLogprob | None] | None = None) -> None:
        self.sampled = Sampled(np.array(tokens, np.int32), tuple(logprobs or [None] * len(tokens)))

    def run(self, batch: Any) -> Sampled:
        return self.sampled

    def logits(self, batch: Any) -> Any:
        raise AssertionError("not used here")

    def close(self) -> None:
        pass


def run(chunks: list[Chunk], tokens: list[int], logprobs: list[TokenLogprob | None] | None = None) -> Any:
    runner = Runner(Program(tokens, logprobs), SPEC, Peaks(1e9, 1e9), 1.0)
    return runner.run(StepPlan(1, tuple(chunks)), None).chunks  # type: ignore[arg-type]


def test_rows_come_in_the_order_scored_sampled_forks() -> None:
    lp = [TokenLogprob(i, -float(i)) for i in range(5)]
    chunks = [
        Chunk("a", 0, 4, samples=0),
        Chunk("b", 0, 3, samples=1, scored=2, forks=("b#1",)),
        Chunk("c", 7, 1, samples=1),
    ]
    a, b, c = run(chunks, [10, 11, 12, 13, 14], [lp[0], lp[1], lp[2], None, lp[4]])
    assert a.tokens == ()
    assert (b.tokens, b.fork_tokens, b.scored) == ((12,), (13,), (lp[0], lp[1]))
    assert b.logprobs == (lp[2],)
    assert b.fork_logprobs == (None,)
    assert (c.tokens, c.logprobs) == ((14,), (lp[4],))


@pytest.mark.parametrize(
    ("draft", "drawn", "accepted"),
    [
        ((), [5], (5,)),
        ((5, 6), [5, 6, 7], (5, 6, 7)),
        ((5, 6), [5, 9, 7], (5, 9)),
        ((5, 6), [8, 6, 7], (8,)),
    ],
)
def test_a_draft_is_accepted_up_to_the_first_disagreement(
    draft: tuple[int, ...], drawn: list[int], accepted: tuple[int, ...]
) -> None:
    (chunk,) = run([Chunk("a", 0, len(drawn), samples=len(drawn), draft=draft)], drawn)
    assert chunk.tokens == accepted
