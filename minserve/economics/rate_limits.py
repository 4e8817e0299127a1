"""What a caller is told of its caps, as OpenAI spells it: the 429 for one that is reached, headers with what is left.

Owns the words. It must not count anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minserve.economics.caps import ScopeKind, Window
from minserve.economics.prices import money
from minserve.economics.windows import SECONDS, Amount, Counter
from minserve.request import RequestError

_WHOSE: Mapping[ScopeKind, str] = {
    "server": "The server's spending limit",
    "key": "This API key",
    "user": "This account",
    "end_user": "This user",
    "token": "This page token",
    "run": "This run",
}
_CODES: Mapping[ScopeKind, str] = {"server": "server_budget_exceeded", "run": "run_budget_exceeded"}


def refusal(window: Window, amount: Amount, now: float) -> RequestError:
    """The 429 for a cap that `amount` would pass. Only a minute's cap is worth a client's automatic retry."""
    scope, limit, counter = window
    surplus = limit.surplus(counter.total.plus(amount))
    wait = counter.wait(now, surplus)
    index = next(i for i, over in enumerate(surplus.capped) if over)
    kind, cap = limit.caps[index]
    needs, left = amount.capped[index], amount.capped[index] - surplus.capped[index]
    said = money if kind == "money" else str
    shown = f"a cost of {money(cap or 0)}" if kind == "money" else f"{cap} {kind}"
    message = f"{_WHOSE[scope.kind]} allows {shown} {limit.period}"
    if limit.surplus(amount).capped[index]:
        message += f"; this call alone may need {said(needs)}. Ask for less (max_tokens, n, a shorter prompt)."
        wait = None
    elif left > 0 and scope.kind != "server":  # what all spend together is the operator's business
        message += f" and has {said(left)} left; this call may need {said(needs)}."
    else:
        message += ", and that is used up."
    if wait is not None:
        if limit.period.rolling:  # its last bucket stays up to a part longer, but nobody has to wait for that
            wait = min(wait, SECONDS[limit.period.span])
        message += f" There is room again in {duration(wait)}."
    brief = limit.period.span == "minute" and wait is not None
    code = _CODES.get(scope.kind) or ("rate_limit_exceeded" if limit.period.span == "minute" else "budget_exceeded")
    return RequestError(
        message,
        status=429,
        code=code,
        kind="rate_limit_exceeded" if code == "rate_limit_exceeded" else "insufficient_quota",
        retry_after=wait,
        should_retry=None if brief else False,
    )


def rate_headers(windows: Sequence[Window], now: float) -> dict[str, str]:
    """`x-ratelimit-*` of the tightest window, of requests and of tokens; nothing where there is no cap."""
    headers: dict[str, str] = {}
    for index, kind in enumerate(("requests", "tokens")):
        rooms: list[tuple[int, int, Counter]] = []
        for _, limit, counter in windows:
            cap = limit.caps[index][1]
            if cap is not None:
                counter.advance(now)
                rooms.append((max(0, cap - counter.total.capped[index]), cap, counter))
        if rooms:
            left, cap, counter = min(rooms, key=lambda room: room[0])
            headers[f"x-ratelimit-limit-{kind}"] = str(cap)
            headers[f"x-ratelimit-remaining-{kind}"] = str(left)
            if (reset := counter.reset_in(now)) is not None:
                headers[f"x-ratelimit-reset-{kind}"] = duration(reset)
    return headers


def duration(seconds: float) -> str:
    """As rate-limit headers spell it: 20ms, 1s, 6m0s, 1h0m0s. Rounded up, so that waiting that long is enough."""
    if seconds < 1:
        return f"{-int(-seconds * 1000 // 1)}ms"
    whole = -int(-seconds // 1)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minute}m{second}s"
    return f"{minute}m{second}s" if minute else f"{second}s"
