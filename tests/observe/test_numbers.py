"""The live numbers: right within the sketch's error, only the last minute, bounded."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.observe.numbers import Numbers
from minserve.observe.sketch import Window
from minserve.observe.trace import StepTrace
from minserve.request import Pool
from tests.observe.records import outcome, step


@given(st.lists(st.floats(2e-6, 1e4), min_size=1, max_size=300), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_within_one_percent_of_the_exact_one(values: list[float], q: float) -> None:
    window = Window()
    for value in values:
        window.add(value, 0.0)
    exact = sorted(values)[math.ceil(q * len(values)) - 1]
    assert window.quantile(q, 0.0) == pytest.approx(exact, rel=0.0101)


def test_the_window_forgets_and_stays_small() -> None:
    window, rng = Window(60.0), random.Random(1)
    for i in range(20_000):
        window.add(rng.lognormvariate(-4, 2), i * 0.1)
    assert window.count(2000.0) <= 620
    assert len(window._slices) <= 31
    assert max(len(buckets) for _, buckets in window._slices) < 1200
    assert window.quantile(0.5, 2100.0) is None
    assert window.count(2100.0) == 0


def numbers_after(seconds: float) -> tuple[Numbers, list[float]]:
    now = [1000.0]
    numbers = Numbers(clock=lambda: now[0])
    now[0] += seconds
    return numbers, now


def test_the_three_numbers_are_per_pool_and_utilization_is_ideal_time_over_wall_time() -> None:
    numbers, now = numbers_after(0.0)
    for i in range(100):
        now[0] += 0.1
        numbers.observe(
            step(
                run=0.05,
                ideal=0.02,
                running={Pool.INTERACTIVE: 3, Pool.BULK: 1},
                ttfts=((Pool.INTERACTIVE, 0.001 * (i + 1)),),
                gaps=((Pool.BULK, 0.5),),
                prefix_queries=10,
                prefix_hits=4,
            )
        )
    numbers.observe(outcome())
    s = numbers.snapshot()
    assert s.window == pytest.approx(10.0)
    assert s.utilization == pytest.approx(0.2)
    assert s.busy == pytest.approx(0.5)
    assert s.running == pytest.approx(4.0)
    assert s.pools[Pool.INTERACTIVE].ttft_p99 == pytest.approx(0.099, rel=0.01)
    assert s.pools[Pool.INTERACTIVE].itl_p99 is None
    assert s.pools[Pool.BULK].itl_p99 == pytest.approx(0.5, rel=0.01)
    assert s.pools[Pool.INTERACTIVE].requests == 100
    assert s.decode_tokens_per_s == pytest.approx(30.0)
    assert s.prefill_tokens_per_s == pytest.approx(130.0)
    assert s.prefix_hit_share == pytest.approx(0.4)


def test_after_a_quiet_minute_nothing_is_left() -> None:
    numbers, now = numbers_after(5.0)
    numbers.observe(step(gaps=((Pool.BULK, 0.5),)))
    now[0] += 100.0
    s = numbers.snapshot()
    assert (s.utilization, s.busy, s.steps_per_s, s.running) == (0, 0, 0, 0)
    assert s.pools[Pool.BULK].itl_p99 is None
    assert s.window == 60.0


def test_plans_of_which_nothing_can_run_are_no_steps() -> None:
    numbers, _ = numbers_after(5.0)
    trace = StepTrace(steps=3)
    idle = {"decode_tokens": 0, "prefill_tokens": 0, "run": 0.0}
    for record in (step(step=1), *(step(step=i, **idle) for i in range(2, 50)), step(step=50)):
        numbers.observe(record)
        trace.observe(record)
    assert numbers.snapshot().steps_per_s == pytest.approx(2 / 5)
    assert [row["step"] for row in trace.rows()] == [1, 49, 50]


def test_the_trace_keeps_the_last_steps_in_order() -> None:
    trace = StepTrace(steps=3)
    assert trace.last is None
    for i in range(5):
        trace.observe(step(step=i, gaps=((Pool.BULK, 0.25),), waits={"seats": 2}))
    trace.observe(outcome())
    assert [r["step"] for r in trace.rows()] == [2, 3, 4]
    assert [r["step"] for r in trace.rows(1)] == [4]
    assert trace.rows(1)[0]["worst_gap_ms"] == 250.0
    assert trace.rows(1)[0]["waits"] == {"seats": 2}
    assert trace.last is not None
