"""What a commit makes of a result: drafts that were right or wrong, and less or more than was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minserve.batch import ChunkResult, StepResult
from minserve.policy.limits import Limits
from minserve.policy.schedule import plan_step
from minserve.request import FinishReason, SamplingParams, StepPlan, Submission, View
from minserve.scheduler import Scheduler
from tests.driver import Driver, prompt
from tests.fake_program import VOCAB
from tests.policy.plans import make_limits

# -- drafts


def drafting(*proposals: tuple[int, ...]) -> Any:
    """A policy that is told of these drafts, one after the other, once the prompt is computed."""
    left = list(proposals)

    def plan(step: int, running: Sequence[View], waiting: Sequence[View], free: int, limits: Limits) -> StepPlan:
        views = [view._replace(draft=left.pop(0)) if left else view for view in running]
        return plan_step(step, views, waiting, free, limits)

    return plan


def test_accepted_drafts_are_tokens_and_rejected_ones_leave_no_trace() -> None:
    right = Driver(make_limits())
    tokens = right.expected[right.submit("r", prompt(6), max_tokens=12)[0]].tokens
    wrong = (tokens[5] + 1) % VOCAB
    d = Driver(make_limits(), plan=drafting(tuple(tokens[1:4]), (wrong, 0, 0), tuple(tokens[6:8])))
    name = d.submit("r", prompt(6), max_tokens=12)[0]
    d.run()
    assert d.chunks(name)[:4] == [(0, 6), (6, 4), (10, 4), (11, 3)]
    assert d.tokens(name) == tokens
    again = d.submit("again", prompt(6) + tokens, max_tokens=1)[0]
    d.run()
    assert d.tokens(again) == d.expected[again].tokens, "only blocks full of accepted tokens are in the index"


def test_accepted_drafts_behind_a_stop_token_are_dropped() -> None:
    right = Driver(make_limits())
    tokens = right.expected[right.submit("r", prompt(6), max_tokens=12)[0]].tokens
    d = Driver(make_limits(), plan=drafting(tuple(tokens[1:6])))
    stop = next(token for token in tokens[2:] if token not in tokens[:2])
    name = d.submit("r", prompt(6), max_tokens=12, stop_token_ids=frozenset({stop}))[0]
    d.run()
    assert d.tokens(name) == tokens[: tokens.index(stop) + 1]
    assert d.end(name).finish is FinishReason.STOP
    assert d.scheduler.counts().blocks_cached == (6 + tokens.index(stop)) // 4, "nor are their rows in the index"
    d.check_idle()


# -- a result that says more or less than asked


def test_log_probabilities_may_be_missing_from_a_result() -> None:
    scheduler = Scheduler(make_limits(), weights_id=b"w")
    scheduler.submit(Submission("r", (1, 2, 3), SamplingParams(max_tokens=1), n=2), 0, 0.0)
    plan = scheduler.plan()
    events = scheduler.commit(plan, StepResult((ChunkResult(tokens=(4,), fork_tokens=(5,)),)))
    assert {(event.request_id, event.token_id, event.logprob) for event in events} == {
        ("r#0", 4, None),
        ("r#1", 5, None),
    }


def test_a_stop_token_before_min_tokens_does_not_end_a_request_even_if_it_is_drawn() -> None:
    scheduler = Scheduler(make_limits(), weights_id=b"w")
    params = SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=frozenset({4}))
    scheduler.submit(Submission("r", (1, 2, 3), params), 0, 0.0)
    ends = []
    for _ in range(3):
        (event,) = scheduler.commit(scheduler.plan(), StepResult((ChunkResult(tokens=(4,)),)))
        ends.append(event.finish)
    assert ends == [None, None, FinishReason.STOP]
