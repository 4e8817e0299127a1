"""Prices: integers, rounded up, never cheaper to reserve than to settle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.config import PricesConfig
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
