"""The limiter's bounds on memory, its messages and its headers."""

from __future__ import annotations

import pytest

from minserve.economics import limits as limits_module
from minserve.economics.limits import Limit, Limiter, Payer, Scope, duration, rate_headers
from minserve.economics.windows import Amount, Period
from minserve.request import RequestError

MINUTE, DAY = Period("minute"), Period("day")


def payer(kind: str, *name: str, limit: Limit | None = None, until: float | None = None) -> Payer:
    return Payer(Scope(kind, name), (limit or Limit(DAY, requests=2),), until)


def test_a_refusal_by_one_payer_counts_against_nobody() -> None:
    limiter = Limiter()
    rich, poor = payer("key", "a", limit=Limit(DAY, requests=9)), payer("user", "u", limit=Limit(DAY, requests=0))
    with pytest.raises(RequestError):
        limiter.take([rich, poor], Amount(1), 0.0)
    assert limiter.used(rich.scope, DAY, 0.0) == Amount()


def test_two_caps_of_one_period_are_counted_once() -> None:
    limiter = Limiter()
    both = Payer(Scope("key", ("a",)), (Limit(DAY, requests=9), Limit(DAY, tokens=9)))
    ticket = limiter.take([both], Amount(1, 5), 0.0)
    assert limiter.used(both.scope, DAY, 0.0) == Amount(1, 5)
    limiter.correct(ticket, Amount(1, 2))
    assert limiter.used(both.scope, DAY, 0.0) == Amount(1, 2)


def test_counters_of_names_that_clients_choose_are_dropped_when_their_windows_are_empty() -> None:
    limiter = Limiter()
    for i in range(5000):
        limiter.take([payer("end_user", "k", f"u{i}", limit=Limit(MINUTE, requests=1))], Amount(1), i * 60.0)
    assert sum(1 for _ in limiter) < 1100


def test_beyond_a_bound_new_names_share_one_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "MAX_NAMES", 10)
    limiter = Limiter()
    for i in range(12):  # the last two share a counter for two
        limiter.take([payer("end_user", "k", f"u{i}")], Amount(1), 0.0)
    with pytest.raises(RequestError):
        limiter.take([payer("end_user", "k", "u99")], Amount(1), 0.0)
    limiter.take([payer("end_user", "k", "u3")], Amount(1), 0.0)


def test_scopes_that_end_are_forgotten_after_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = Limiter()
    life = Limit(Period("ever"), requests=1)
    for i in range(3000):
        limiter.take([payer("run", "k", f"r{i}", limit=life, until=i + 10.0)], Amount(1), float(i))
    assert sum(1 for _ in limiter) < 1100
    assert limiter.knows(Scope("run", ("k", "r2999")))


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
    assert rate_headers(limiter, [who], 30.0) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "9",
        "x-ratelimit-reset-requests": "30s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "30",
        "x-ratelimit-reset-tokens": "23h59m30s",
    }
    assert rate_headers(limiter, [], 30.0) == {}


def test_a_refusal_names_the_cap_but_nobody_else() -> None:
    limiter = Limiter()
    who = payer("server", limit=Limit(DAY, cost=5))
    limiter.take([who], Amount(1, 1, 4), 0.0)
    with pytest.raises(RequestError) as caught:
        limiter.take([who], Amount(1, 1, 4), 0.0)
    assert caught.value.message == (
        "The server's spending limit allows a cost of 0.000000005 per day, and that is used up. "
        "There is room again in 24h0m0s."
    )


def test_a_refusal_says_what_is_left_to_a_smaller_call() -> None:
    limiter = Limiter()
    who = payer("key", "k", limit=Limit(DAY, tokens=60))
    limiter.take([who], Amount(1, 50), 0.0)
    with pytest.raises(RequestError) as caught:
        limiter.take([who], Amount(1, 25), 0.0)
    assert caught.value.message == (
        "This API key allows 60 tokens per day and has 10 left; this call may need 25. There is room again in 24h0m0s."
    )
    limiter.take([who], Amount(1, 10), 0.0)


def test_the_call_at_which_empty_counters_are_dropped_is_counted_itself() -> None:
    limiter = Limiter()
    for i in range(3000):
        new = payer("end_user", "k", f"u{i}", limit=Limit(MINUTE, requests=1))
        limiter.take([new], Amount(1), i * 60.0)
        assert limiter.used(new.scope, MINUTE, i * 60.0) == Amount(1)
