"""What gives way under load, in a defined order: shorter answers, bulk work, the model itself for some features, calls.

Pure: load in, decision out. The caller makes each step visible (header, metric, ledger row); nothing is ever cut
silently. It must not know how load is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from minserve.request import Pool, RequestError


class Step(IntEnum):
    """Each includes those before it. `word` names it in headers, metrics and the ledger."""

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

    A step is taken back only when pressure is `hysteresis` below its threshold, so that nothing flutters.
    """

    thresholds: tuple[float, float, float, float] = (0.5, 0.7, 0.9, 1.0)
    hysteresis: float = 0.1
    shrink_to: int = 128
    texts: Mapping[str, str] = field(default_factory=dict)
    message: str = "The server is overloaded. Please try again later."


@dataclass(frozen=True, slots=True)
class Load:
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
    """What happens to one call. applied: the step that cuts it, None when nothing is cut.

    max_tokens: what it may generate. text: the static answer, instead of the model.
    """

    max_tokens: int
    applied: Step | None = None
    text: str | None = None


def step_of(load: Load, ladder: Ladder, before: Step) -> Step:
    """The step that this load calls for, given the one that holds now."""
    pressure = load.pressure
    reached = Step(sum(pressure >= threshold for threshold in ladder.thresholds))
    if reached >= before:
        return reached
    held = Step(sum(pressure >= threshold - ladder.hysteresis for threshold in ladder.thresholds))
    return min(before, held)


def thrift(spent: float, ladder: Ladder) -> Step:
    """The step that money calls for. spent: the used share of the server's spending limit.

    Nobody is refused for it here: whoever is not served more cheaply meets the limit itself.
    """
    return min(Step.STATIC, Step(sum(spent >= threshold for threshold in ladder.thresholds)))


def decide(
    step: Step, ladder: Ladder, wait: float | None, *, pool: Pool, feature: str, max_tokens: int, allows_shrink: bool
) -> Decision:
    """What the step means for one call. RequestError 503 if it may not run now.

    wait: seconds after which it should come back, None if that can't be said.
    """
    retry_after = None if wait is None else max(1.0, wait)
    if step >= Step.PAUSE_BULK and pool is Pool.BULK:
        raise RequestError(
            "Bulk work is paused while the server is under load.",
            status=503,
            code="bulk_paused",
            retry_after=retry_after,
            degraded=Step.PAUSE_BULK.word,
        )
    if step >= Step.STATIC and feature in ladder.texts:
        return Decision(0, Step.STATIC, ladder.texts[feature])
    if step >= Step.REFUSE:
        raise RequestError(
            ladder.message, status=503, code="overloaded", retry_after=retry_after, degraded=Step.REFUSE.word
        )
    if step >= Step.SHRINK and allows_shrink and max_tokens > ladder.shrink_to:
        return Decision(ladder.shrink_to, Step.SHRINK)
    return Decision(max_tokens)
