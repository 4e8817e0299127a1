"""The ladder of degradation: in order, each step visible, no flutter."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.policy.degrade import Decision, Ladder, Load, Step, decide, step_of, thrift
from minserve.request import Pool, RequestError

LADDER = Ladder(texts={"greeting": "Hello! We are busy."}, shrink_to=100)


def load(pressure: float) -> Load:
    return Load(queued=0, max_queue=10, wait=pressure * 30.0, ceiling=30.0)


def asked(step: Step, **fields: Any) -> Decision:
    call = {"pool": Pool.INTERACTIVE, "feature": "chat", "max_tokens": 400, "allows_shrink": True, **fields}
    return decide(step, LADDER, 12.0, **call)


def test_pressure_is_the_fuller_of_queue_and_waiting_time() -> None:
    assert Load(5, 10, 3.0, 30.0).pressure == 0.5
    assert Load(1, 10, 27.0, 30.0).pressure == 0.9
    assert Load(0, 0, 0.0, 30.0).pressure == 0.0


@pytest.mark.parametrize(
    ("pressure", "step"),
    [(0.0, 0), (0.49, 0), (0.5, 1), (0.69, 1), (0.7, 2), (0.9, 3), (0.999, 3), (1.0, 4), (50.0, 4)],
)
def test_steps_come_in_their_order(pressure: float, step: int) -> None:
    assert step_of(load(pressure), LADDER, Step.NONE) == step


def test_a_step_is_taken_back_only_well_below_its_threshold() -> None:
    step = step_of(load(1.0), LADDER, Step.NONE)
    seen = []
    for pressure in (0.95, 0.91, 0.85, 0.79, 0.65, 0.59, 0.45, 0.39):
        step = step_of(load(pressure), LADDER, step)
        seen.append(int(step))
    assert seen == [4, 4, 3, 2, 2, 1, 1, 0]


@given(st.lists(st.floats(0, 2), max_size=30))
def test_the_step_always_lies_between_the_two_thresholds(pressures: list[float]) -> None:
    step = Step.NONE
    for pressure in pressures:
        step = step_of(load(pressure), LADDER, step)
        assert step_of(load(pressure), LADDER, Step.NONE) <= step
        assert step <= step_of(load(pressure + LADDER.hysteresis + 1e-9), LADDER, Step.NONE)


def test_nothing_is_cut_without_pressure() -> None:
    assert asked(Step.NONE) == Decision(400)
    assert asked(Step.NONE, pool=Pool.BULK, feature="greeting") == Decision(400)


def test_only_those_who_allow_it_are_shortened_and_they_are_told() -> None:
    assert asked(Step.SHRINK) == Decision(100, Step.SHRINK)
    assert asked(Step.SHRINK, allows_shrink=False) == Decision(400)
    assert asked(Step.SHRINK, max_tokens=50) == Decision(50)
    assert asked(Step.STATIC) == Decision(100, Step.SHRINK)


def test_bulk_gives_way_before_anybody_who_waits() -> None:
    assert asked(Step.SHRINK, pool=Pool.BULK).max_tokens == 100
    for step in (Step.PAUSE_BULK, Step.STATIC, Step.REFUSE):
        with pytest.raises(RequestError) as caught:
            asked(step, pool=Pool.BULK)
        assert (caught.value.status, caught.value.code, caught.value.retry_after) == (503, "bulk_paused", 12.0)
        assert caught.value.degraded == "pause_bulk"


def test_features_with_a_text_are_answered_without_the_model_even_when_others_are_refused() -> None:
    for step in (Step.STATIC, Step.REFUSE):
        assert asked(step, feature="greeting") == Decision(0, Step.STATIC, "Hello! We are busy.")


def test_the_last_step_is_a_clear_refusal_with_a_time() -> None:
    with pytest.raises(RequestError) as caught:
        asked(Step.REFUSE)
    assert (caught.value.status, caught.value.code, caught.value.retry_after) == (503, "overloaded", 12.0)
    assert (caught.value.message, caught.value.degraded) == (LADDER.message, "refuse")


@pytest.mark.parametrize(("spent", "step"), [(0.0, 0), (0.5, 1), (0.7, 2), (0.9, 3), (1.0, 3), (7.0, 3)])
def test_money_that_runs_out_is_saved_in_the_same_order_but_refuses_nobody(spent: float, step: int) -> None:
    assert thrift(spent, LADDER) == step
