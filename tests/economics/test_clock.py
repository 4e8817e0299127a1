"""The clock of budgets: never back, follows forward, slews after it was set back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.economics.clock import SteadyClock


class Fake:
    def __init__(self, wall: float = 1e9, monotonic: float = 0.0) -> None:
        self.wall, self.monotonic = wall, monotonic

    def clock(self, floor: float = 0.0) -> SteadyClock:
        return SteadyClock(lambda: self.wall, lambda: self.monotonic, floor=floor)

    def pass_(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(-1e6, 1e6)), max_size=50))
def test_each_time_is_later_whatever_the_system_clock_does(jumps: list[tuple[float, float]]) -> None:
    fake = Fake()
    clock = fake.clock()
    last = clock()
    for seconds, jump in jumps:
        fake.pass_(seconds)
        fake.wall += jump
        now = clock()
        assert now > last
        last = now


def test_after_a_jump_back_it_runs_at_half_speed_until_real_time_has_caught_up() -> None:
    fake = Fake(wall=1000.0)
    clock = fake.clock()
    fake.wall -= 100
    assert clock() == pytest.approx(1000.0, abs=1e-6)
    fake.pass_(50)
    assert clock() == pytest.approx(1025.0, abs=1e-6)
    fake.pass_(160)
    assert clock() == fake.wall


def test_a_jump_forward_is_followed() -> None:
    fake = Fake(wall=1000.0)
    clock = fake.clock()
    fake.wall += 8 * 3600
    assert clock() == 1000.0 + 8 * 3600


def test_a_restart_continues_from_the_ledger_unless_that_time_is_absurd() -> None:
    fake = Fake(wall=1000.0)
    for floor, now in ((1500.0, 1500.0), (500.0, 1000.0), (1000.0 + 10 * 86400, 1000.0)):
        assert fake.clock(floor)() == pytest.approx(now, abs=1e-6)
    assert fake.clock(floor=1500.0)() > 1500.0
