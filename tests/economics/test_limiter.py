"""The limiter: all windows or none, and its bounds on memory."""

from __future__ import annotations

import pytest

from minserve.economics import limiter as limiter_module
from minserve.economics.caps import Limit, Payer, Scope, ScopeKind
from minserve.economics.limiter import Limiter
from minserve.economics.windows import Amount, Period
from minserve.request import RequestError

MINUTE, DAY = Period("minute"), Period("day")


def payer(kind: ScopeKind, *name: str, limit: Limit | None = None, until: float | None = None) -> Payer:
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
    monkeypatch.setattr(limiter_module, "MAX_NAMES", 10)
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


def test_the_call_at_which_empty_counters_are_dropped_is_counted_itself() -> None:
    limiter = Limiter()
    for i in range(3000):
        new = payer("end_user", "k", f"u{i}", limit=Limit(MINUTE, requests=1))
        limiter.take([new], Amount(1), i * 60.0)
        assert limiter.used(new.scope, MINUTE, i * 60.0) == Amount(1)
