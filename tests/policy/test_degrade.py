"""The ladder of degradation: in order, each rung visible, no flutter."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.policy.degrade import Backlog, Decision, Ladder, Rung, decide, rung_of, thrift
from minserve.request import Pool, RequestError

LADDER = Ladder(texts={"greeting": "Hello! We are busy."}, shrink_to=100)


def backlog(pressure: float) -> Backlog:
    return Backlog(queued=0, max_queue=10, wait=pressure * 30.0, ceiling=30.0)


def asked(rung: Rung, **fields: Any) -> Decision:
    call = {"pool": Pool.INTERACTIVE, "feature": "chat", "max_tokens": 400, "allows_shrink": True, **fields}
    return decide(rung, LADDER, 12.0, **call)


def test_pressure_is_the_fuller_of_queue_and_waiting_time() -> None:
    assert Backlog(5, 10, 3.0, 30.0).pressure == 0.5
    assert Backlog(1, 10, 27.0, 30.0).pressure == 0.9
    assert Backlog(0, 0, 0.0, 30.0).pressure == 0.0


@pytest.mark.parametrize(
    ("pressure", "rung"),
    [(0.0, 0), (0.49, 0), (0.5, 1), (0.69, 1), (0.7, 2), (0.9, 3), (0.999, 3), (1.0, 4), (50.0, 4)],
)
def test_rungs_come_in_their_order(pressure: float, rung: int) -> None:
    assert rung_of(backlog(pressure), LADDER, Rung.NONE) == rung


def test_a_rung_is_taken_back_only_well_below_its_threshold() -> None:
    rung = rung_of(backlog(1.0), LADDER, Rung.NONE)
    seen = []
    for pressure in (0.95, 0.91, 0.85, 0.79, 0.65, 0.59, 0.45, 0.39):
        rung = rung_of(backlog(pressure), LADDER, rung)
        seen.append(int(rung))
    assert seen == [4, 4, 3, 2, 2, 1, 1, 0]


@given(st.lists(st.floats(0, 2), max_size=30))
def test_the_rung_always_lies_between_the_two_thresholds(pressures: list[float]) -> None:
    rung = Rung.NONE
    for pressure in pressures:
        rung = rung_of(backlog(pressure), LADDER, rung)
        assert rung_of(backlog(pressure), LADDER, Rung.NONE) <= rung
        assert rung <= rung_of(backlog(pressure + LADDER.hysteresis + 1e-9), LADDER, Rung.NONE)


def test_nothing_is_cut_without_pressure() -> None:
    assert asked(Rung.NONE) == Decision(400)
    assert asked(Rung.NONE, pool=Pool.BULK, feature="greeting") == Decision(400)


def test_only_those_who_allow_it_are_shortened_and_they_are_told() -> None:
    assert asked(Rung.SHRINK) == Decision(100, Rung.SHRINK)
    assert asked(Rung.SHRINK, allows_shrink=False) == Decision(400)
    assert asked(Rung.SHRINK, max_tokens=50) == Decision(50)
    assert asked(Rung.STATIC) == Decision(100, Rung.SHRINK)


def test_bulk_gives_way_before_anybody_who_waits() -> None:
    assert asked(Rung.SHRINK, pool=Pool.BULK).max_tokens == 100
    for rung in (Rung.PAUSE_BULK, Rung.STATIC, Rung.REFUSE):
        with pytest.raises(RequestError) as caught:
            asked(rung, pool=Pool.BULK)
        assert (caught.value.status, caught.value.code, caught.value.retry_after) == (503, "bulk_paused", 12.0)
        assert caught.value.degraded == "pause_bulk"


def test_features_with_a_text_are_answered_without_the_model_even_when_others_are_refused() -> None:
    for rung in (Rung.STATIC, Rung.REFUSE):
        assert asked(rung, feature="greeting") == Decision(0, Rung.STATIC, "Hello! We are busy.")


def test_the_last_rung_is_a_clear_refusal_with_a_time() -> None:
    with pytest.raises(RequestError) as caught:
        asked(Rung.REFUSE)
    assert (caught.value.status, caught.value.code, caught.value.retry_after) == (503, "overloaded", 12.0)
    assert (caught.value.message, caught.value.degraded) == (LADDER.message, "refuse")


@pytest.mark.parametrize(("spent", "rung"), [(0.0, 0), (0.5, 1), (0.7, 2), (0.9, 3), (1.0, 3), (7.0, 3)])
def test_money_that_runs_out_is_saved_in_the_same_order_but_refuses_nobody(spent: float, rung: int) -> None:
    assert thrift(spent, LADDER) == rung
