"""Counters of periods: exact at boundaries, never more than the cap in any window, refunds to the right bucket."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.economics.windows import SECONDS, ZERO, Amount, Counter, Period

ONE = Amount(1, 10, 100)


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("span", "last", "first"),
    [
        ("minute", "2026-03-01T10:59:59.999", "2026-03-01T11:00:00"),
        ("hour", "2026-03-01T10:59:59.999", "2026-03-01T11:00:00"),
        ("day", "2026-02-28T23:59:59.999", "2026-03-01T00:00:00"),
        ("month", "2026-02-28T23:59:59.999", "2026-03-01T00:00:00"),
        ("month", "2027-12-31T23:59:59.999", "2028-01-01T00:00:00"),
    ],
)
def test_a_calendar_period_ends_exactly_at_its_boundary(span: str, last: str, first: str) -> None:  # bug: 66
    counter = Counter(Period(span))  # type: ignore[arg-type]
    counter.add(at(last), ONE)
    counter.advance(at(last))
    assert counter.total == ONE
    assert counter.reset_in(at(last)) == pytest.approx(0.001, abs=1e-4)
    counter.advance(at(first))
    assert counter.total == ZERO


def test_a_rolling_period_forgets_an_amount_after_it_has_left_and_not_before() -> None:
    counter = Counter(Period("hour", rolling=True))
    counter.add(1000.0, ONE)
    counter.advance(1000.0 + 3600.0)
    assert counter.total == ONE
    counter.advance(1000.0 + 3600.0 + 60.0)  # at most one bucket later
    assert counter.total == ZERO


def test_a_refund_goes_to_the_bucket_of_the_reservation() -> None:
    counter = Counter(Period("minute"))
    bucket = counter.add(59.0, ONE)
    counter.advance(61.0)
    counter.add(61.0, ONE)
    counter.correct(bucket, Amount(0, -5, -50))  # the reservation's minute is over: nothing to give back
    assert counter.total == ONE


def test_waiting_as_long_as_the_counter_says_makes_room() -> None:
    counter = Counter(Period("minute", rolling=True))
    for second in (0, 10, 20):
        counter.add(float(second), ONE)
    wait = counter.wait(25.0, Amount(2, 0, 0))
    assert wait is not None
    counter.advance(25.0 + wait)
    assert counter.total.requests == 1
    assert counter.wait(25.0 + wait, Amount(5, 0, 0)) is None


def test_a_life_long_period_never_forgets() -> None:
    counter = Counter(Period("ever"))
    counter.add(0.0, ONE)
    counter.advance(1e12)
    assert counter.total == ONE
    assert counter.reset_in(1e12) is None
    assert counter.wait(1e12, Amount(1)) is None


events = st.lists(st.tuples(st.floats(0, 400), st.integers(0, 5)), min_size=1, max_size=60)


@given(events, st.sampled_from(["minute", "hour"]), st.booleans(), st.integers(1, 20))
def test_no_window_ever_holds_more_than_the_cap(
    steps: list[tuple[float, int]], span: str, rolling: bool, cap: int
) -> None:
    """Amounts are let in by the counter; then every window of the period is checked against the amounts themselves."""
    period = Period(span, rolling)  # type: ignore[arg-type]
    counter, now = Counter(period), 1e9
    admitted: list[tuple[float, int]] = []
    for gap, wanted in steps:
        now += gap
        counter.advance(now)
        if counter.total.requests + wanted <= cap:
            counter.add(now, Amount(wanted))
            admitted.append((now, wanted))
    length = SECONDS[period.span]
    for end, _ in admitted:
        if rolling:
            inside = sum(n for t, n in admitted if end - length < t <= end)
        else:
            inside = sum(n for t, n in admitted if int(t / length) == int(end / length))
        assert inside <= cap


@given(events, st.sampled_from(["minute", "hour", "day", "month"]), st.booleans())
def test_the_total_is_the_sum_of_what_still_counts(steps: list[tuple[float, int]], span: str, rolling: bool) -> None:
    period = Period(span, rolling)  # type: ignore[arg-type]
    counter, now = Counter(period), 1.7e9
    seen: list[tuple[float, int]] = []
    for gap, amount in steps:
        now += gap * 60
        counter.add(now, Amount(amount))
        seen.append((now, amount))
        counter.advance(now)
        counted = sum(n for t, n in seen if period.bucket(t) >= period.oldest(now))
        assert counter.total.requests == counted
        assert len(counter.buckets) <= 61
        assert period.since(now) <= now
        assert period.bucket(period.since(now)) == period.oldest(now)
