"""What gives way under load, in a defined order: shorter answers, bulk work, the model itself for some features, calls.

Pure: backlog in, decision out. The caller makes each rung visible (header, metric, ledger row); nothing is ever cut
silently. It must not know how load is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from minserve.request import Pool, RequestError


class Rung(IntEnum):
    """A rung of the ladder; each includes those before it. `word` names it in headers, metrics and the ledger."""

    NONE = 0
    SHRINK = 1  # answers of those who allow it are cut to Ladder.shrink_to tokens
    PAUSE_BULK = 2  # bulk work waits, new bulk work is refused
    STATIC = 3  # features with a static text get it instead of the model
    REFUSE = 4  # 503 with Retry-After

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Ladder:
    """thresholds: the pressure at which SHRINK, PAUSE_BULK, STATIC and REFUSE begin, ascending.

    A rung is taken back only when pressure is `hysteresis` below its threshold, so that nothing flutters.
    """

    thresholds: tuple[float, float, float, float] = (0.5, 0.7, 0.9, 1.0)
    hysteresis: float = 0.1
    shrink_to: int = 128
    texts: Mapping[str, str] = field(default_factory=dict)
    message: str = "The server is overloaded. Please try again later."


@dataclass(frozen=True, slots=True)
class Backlog:
    """The interactive pool's queue. wait: seconds until a call that comes now would start; ceiling: what is allowed."""

    queued: int
    max_queue: int
    wait: float
    ceiling: float

    @property
    def pressure(self) -> float:
        """1.0: the queue is full, or a call that comes now would wait as long as is allowed."""
        return max(self.queued / max(1, self.max_queue), self.wait / self.ceiling)


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one call. applied: the rung that cuts it, None when nothing is cut.

    max_tokens: what it may generate. text: the static answer, instead of the model.
    """

    max_tokens: int
    applied: Rung | None = None
    text: str | None = None


def rung_of(backlog: Backlog, ladder: Ladder, before: Rung) -> Rung:
    """The rung that this backlog calls for, given the one that holds now."""
    pressure = backlog.pressure
    reached = Rung(sum(pressure >= threshold for threshold in ladder.thresholds))
    if reached >= before:
        return reached
    held = Rung(sum(pressure >= threshold - ladder.hysteresis for threshold in ladder.thresholds))
    return min(before, held)


def thrift(spent: float, ladder: Ladder) -> Rung:
    """The rung that money calls for. spent: the used share of the server's spending limit.

    Nobody is refused for it here: whoever is not served more cheaply meets the limit itself.
    """
    return min(Rung.STATIC, Rung(sum(spent >= threshold for threshold in ladder.thresholds)))


def decide(
    rung: Rung, ladder: Ladder, wait: float | None, *, pool: Pool, feature: str, max_tokens: int, allows_shrink: bool
) -> Decision:
    """What the rung means for one call. RequestError 503 if it may not run now.

    wait: seconds after which it should come back, None if that can't be said.
    """
    retry_after = None if wait is None else max(1.0, wait)
    if rung >= Rung.PAUSE_BULK and pool is Pool.BULK:
        raise RequestError(
            "Bulk work is paused while the server is under load.",
            status=503,
            code="bulk_paused",
            retry_after=retry_after,
            degraded=Rung.PAUSE_BULK.word,
        )
    if rung >= Rung.STATIC and feature in ladder.texts:
        return Decision(0, Rung.STATIC, ladder.texts[feature])
    if rung >= Rung.REFUSE:
        raise RequestError(
            ladder.message, status=503, code="overloaded", retry_after=retry_after, degraded=Rung.REFUSE.word
        )
    if rung >= Rung.SHRINK and allows_shrink and max_tokens > ladder.shrink_to:
        return Decision(ladder.shrink_to, Rung.SHRINK)
    return Decision(max_tokens)
