"""A token bucket against a count of what it let through."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minserve.economics.allowance import Allowance


def test_a_burst_and_then_the_rate() -> None:
    allowance = Allowance(rate=2, burst=3)
    assert [allowance.take(100.0) for _ in range(5)] == [True, True, True, False, False]
    assert [allowance.take(100.5) for _ in range(2)] == [True, False]
    assert [allowance.take(1000.0) for _ in range(5)] == [True, True, True, False, False]


@given(st.lists(st.sampled_from([0.0, 0.1, 0.25, 1.0, 10.0]), max_size=100))
def test_no_more_than_the_burst_and_the_rate_since(gaps: list[float]) -> None:
    allowance, now, taken = Allowance(rate=2, burst=3), 50.0, 0
    for gap in gaps:
        now += gap
        taken += allowance.take(now)
        assert taken <= 3 + 2 * (now - 50.0) + 1e-6
