"""Everything that watches the engine, and what the routes /metrics and /status say of it.

Owns the observers' instances. It must not know HTTP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from minserve.config import Config
from minserve.economics.rows import Row
from minserve.engine import Observer
from minserve.observe.doctor import Surroundings, diagnose
from minserve.observe.gauges import Gauges
from minserve.observe.log import log_request
from minserve.observe.metrics import Metrics
from minserve.observe.numbers import Numbers
from minserve.observe.trace import StepTrace
from minserve.status import EngineStatus

_TTFT_TARGET_S = 1.0


class Telemetry:
    """Made before the engine, which is given `observers`; `watch` then says where the live counts come from."""

    def __init__(self, model: str, config: Config) -> None:
        self._config = config
        self._status: Callable[[], EngineStatus] | None = None
        self._extra: dict[str, tuple[str, Callable[[], float]]] = {}
        self.metrics = Metrics(model, self._gauges)
        self.numbers = Numbers()
        self.trace = StepTrace()

    @property
    def observers(self) -> Sequence[Observer]:
        return self.metrics.observe, self.numbers.observe, self.trace.observe

    def watch(self, status: Callable[[], EngineStatus], cache: Mapping[str, str]) -> None:
        """cache: how the KV cache is set up, by vLLM's names."""
        self._status = status
        self.metrics.info = cache

    def gauge(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        """A further gauge of /metrics; a counter if its name ends in _total."""
        self._extra[name] = meaning, read

    def row(self, row: Row) -> None:
        """A call has ended or was refused: its log line and its part of the totals."""
        log_request(msgspec.structs.asdict(row))
        self.metrics.row(row)

    def _gauges(self) -> Gauges:
        """Read when scraped, so that they can't freeze when everything ends at once."""
        if self._status is None:
            return Gauges({}, {}, 0, 0)
        now = self._status()
        last = self.trace.last
        return Gauges(
            running=now.running,
            waiting=now.waiting,
            blocks_total=now.blocks_total,
            blocks_available=now.blocks_free + now.blocks_cached,
            blocks_cached=now.blocks_cached,
            waits=last.waits if last is not None and any(now.waiting.values()) else {},
            extra={name: (meaning, read()) for name, (meaning, read) in self._extra.items()},
        )

    def report(self, calls: int, steps: int) -> dict[str, Any]:
        """Numbers of the last minute, what they point at, and the latest steps."""
        gauges = self._gauges()
        snapshot = self.numbers.snapshot()
        around = Surroundings(
            itl_target=self._config.engine.itl_target_ms / 1000,
            ttft_target=_TTFT_TARGET_S,
            seats=self._config.engine.max_num_seqs,
            blocks_total=gauges.blocks_total,
            blocks_available=gauges.blocks_available,
            waiting=gauges.waiting,
            waits=gauges.waits,
            connections=calls,
        )
        return {
            "numbers": dataclasses.asdict(snapshot),
            "findings": [dataclasses.asdict(finding) for finding in diagnose(snapshot, around)],
            "steps": self.trace.rows(steps) if steps else [],
        }
