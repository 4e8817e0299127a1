"""What a caller is told of its caps: messages and headers."""

from __future__ import annotations

import pytest

from minserve.economics.caps import Limit, Payer, Scope
from minserve.economics.limiter import Limiter
from minserve.economics.rate_limits import duration, rate_headers
from minserve.economics.windows import Amount, Period
from minserve.request import RequestError

MINUTE, DAY = Period("minute"), Period("day")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0201, "21ms"), (1, "1s"), (59.2, "1m0s"), (360, "6m0s"), (3600, "1h0m0s"), (90061, "25h1m1s")],
)
def test_durations_are_spelled_as_rate_limit_headers_spell_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_headers_show_the_tightest_window_of_each_kind() -> None:
    limiter = Limiter()
    limits = (Limit(MINUTE, requests=10), Limit(DAY, requests=50, tokens=100), Limit(Period("hour"), tokens=1000))
    who = Payer(Scope("key", ("a",)), limits)
    limiter.take([who], Amount(1, 70), 30.0)
    assert rate_headers(limiter.windows([who]), 30.0) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "9",
        "x-ratelimit-reset-requests": "30s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "30",
        "x-ratelimit-reset-tokens": "23h59m30s",
    }
    assert rate_headers([], 30.0) == {}


def test_a_refusal_names_the_cap_but_nobody_else() -> None:
    limiter = Limiter()
    who = Payer(Scope("server"), (Limit(DAY, cost=5),))
    limiter.take([who], Amount(1, 1, 4), 0.0)
    with pytest.raises(RequestError) as caught:
        limiter.take([who], Amount(1, 1, 4), 0.0)
    assert caught.value.message == (
        "The server's spending limit allows a cost of 0.000000005 per day, and that is used up. "
        "There is room again in 24h0m0s."
    )


def test_a_refusal_says_what_is_left_to_a_smaller_call() -> None:
    limiter = Limiter()
    who = Payer(Scope("key", ("k",)), (Limit(DAY, tokens=60),))
    limiter.take([who], Amount(1, 50), 0.0)
    with pytest.raises(RequestError) as caught:
        limiter.take([who], Amount(1, 25), 0.0)
    assert caught.value.message == (
        "This API key allows 60 tokens per day and has 10 left; this call may need 25. There is room again in 24h0m0s."
    )
    limiter.take([who], Amount(1, 10), 0.0)
