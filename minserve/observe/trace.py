"""The last steps, one by one: what a person wants to see when a number is odd.

Owns a ring of the engine's step records. Fed by its observer; a step costs one append.
"""

from __future__ import annotations

from collections import deque

from minserve.request import RequestOutcome, StepRecord


class StepTrace:
    def __init__(self, steps: int = 256) -> None:
        self._ring: deque[StepRecord] = deque(maxlen=steps)

    def observe(self, record: StepRecord | RequestOutcome) -> None:
        if isinstance(record, RequestOutcome):
            return
        if not record.tokens and self.last is not None and not self.last.tokens:
            self._ring.pop()  # while nothing can run there is a plan every few milliseconds: the latest stands for all
        self._ring.append(record)

    @property
    def last(self) -> StepRecord | None:
        return self._ring[-1] if self._ring else None

    def rows(self, count: int = 50) -> list[dict[str, object]]:
        """The latest steps, oldest first, as plain values; milliseconds."""
        return [_row(record) for record in list(self._ring)[-count:]]


def _row(record: StepRecord) -> dict[str, object]:
    return {
        "step": record.step,
        "started": round(record.started, 6),
        "plan_ms": _ms(record.plan),
        "build_ms": _ms(record.build),
        "run_ms": _ms(record.run),
        "commit_ms": _ms(record.commit),
        "deliver_ms": _ms(record.deliver),
        "ideal_ms": _ms(record.ideal),
        "prefill_tokens": record.prefill_tokens,
        "decode_tokens": record.decode_tokens,
        "running": dict(record.running),
        "waiting": dict(record.waiting),
        "waits": dict(record.waits),
        "preempted": record.preempted,
        "blocks_free": record.blocks_free,
        "first_tokens": len(record.ttfts),
        "worst_gap_ms": _ms(max((gap for _, gap in record.gaps), default=0.0)),
        "failed": record.failed,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
