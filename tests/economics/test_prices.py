"""Prices: integers, rounded up, never cheaper to reserve than to settle."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from minserve.config import PricesConfig
from minserve.economics.device import priced
from minserve.economics.ledger import Ledger
from minserve.economics.prices import NANO, Prices, money, nano


def test_prefill_cached_and_decode_are_priced_apart() -> None:
    prices = Prices.of(PricesConfig(prefill=1.0, cached=0.25, decode=4.0))
    assert prices.cost(1_000_000, 0, 0) == NANO
    assert prices.cost(1_000_000, 1_000_000, 0) == NANO // 4
    assert prices.cost(0, 0, 1_000_000) == 4 * NANO


def test_cached_tokens_cost_as_much_as_others_unless_said_otherwise() -> None:
    prices = Prices.of(PricesConfig(prefill=1.0))
    assert prices.cost(10, 10, 0) == prices.cost(10, 0, 0)


def test_a_part_of_a_billionth_is_rounded_up() -> None:
    assert Prices.of(PricesConfig(decode=0.0004)).cost(0, 0, 1) == 1


def test_prices_derived_from_device_hours_pay_for_idle_time_too() -> None:
    config = PricesConfig(device_hour=3.6, prefill_tokens_per_s=1000.0, decode_tokens_per_s=100.0, utilization=0.5)
    prices = Prices.of(config)
    assert prices.cost(1_000_000, 0, 0) == nano(2.0)  # 1000 s at 0.001 a second, twice for the idle half
    assert prices.cost(0, 0, 1_000_000) == nano(20.0)
    assert Prices.of(PricesConfig(device_hour=3.6, prefill_tokens_per_s=1.0, decode=7.0)).decode == 7_000_000


async def test_derived_prices_make_the_trailing_week_pay_for_its_hours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = 1_800_000_000.0
    config = PricesConfig(device_hour=3.6, prefill_tokens_per_s=1000.0, decode_tokens_per_s=100.0)
    ledger = Ledger(tmp_path / "l.db")

    async def worked(first: int, hours: int) -> None:
        """Each hour 360,000 prompt tokens, which take 360 s, and 18,000 more that take 180 s."""
        for hour in range(int(now / 3600) + first, int(now / 3600) + first + hours):
            row = (hour, 3600.0, 900.0, 300.0, 360_000, 18_000, 500.0, 400.0)
            ledger.execute(f"INSERT INTO device_hours VALUES ({', '.join('?' * 8)})", row)
        await ledger.flush()

    await worked(-300, 100)  # longer ago than a week
    await worked(-23, 23)
    assert priced(config, ledger.database, now) == Prices.of(config)
    assert "less than a day" in caplog.text
    await worked(-123, 77)
    prices = priced(config, ledger.database, now)
    assert prices.cost(100 * 360_000, 0, 100 * 18_000) == pytest.approx(nano(100 * 3.6), rel=1e-6)
    assert "utilization of 15 %" in caplog.text
    assert priced(structs.replace(config, utilization=0.5), ledger.database, now).decode == nano(20.0) // 1000
    only = structs.replace(config, prefill=1.0, prefill_tokens_per_s=None)  # 500 and 180 s of each hour
    assert priced(only, ledger.database, now).decode == pytest.approx(10.0 / (680 / 3600) * 10**6)
    await ledger.close()


def test_a_cached_token_can_not_cost_more_than_a_computed_one() -> None:
    with pytest.raises(ValueError, match=r"prices\.cached"):
        Prices.of(PricesConfig(prefill=1.0, cached=2.0))


@given(
    st.tuples(*[st.floats(0, 100)] * 3),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
)
def test_what_is_settled_never_exceeds_what_was_reserved(
    per_million: tuple[float, float, float], prompt: int, cached: int, completion: int, more: int
) -> None:
    prefill, cached_price, decode = per_million
    prices = Prices.of(PricesConfig(prefill=max(prefill, cached_price), cached=cached_price, decode=decode))
    assert 0 <= prices.cost(prompt, min(cached, prompt), completion) <= prices.cost(prompt, 0, completion + more)


@pytest.mark.parametrize(
    ("amount", "text"), [(0, "0"), (1, "0.000000001"), (1_500_000, "0.0015"), (12 * NANO, "12"), (-NANO // 2, "-0.5")]
)
def test_money_is_text_without_an_exponent(amount: int, text: str) -> None:
    assert money(amount) == text
