"""Telling the operator: a log line at once, a webhook when it can be reached; never in a request's way.

Owns the queue of alerts that are still to be sent. How a webhook is called is handed in (HTTP is another room's).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field

log = logging.getLogger("minserve.alerts")

Send = Callable[[dict[str, object]], Awaitable[None]]

MAX_WAITING = 100
_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 60.0


@dataclass(frozen=True, slots=True)
class Alert:
    """kind: spend, drift, loop, degraded ... values: numbers that a program may want. time: Unix seconds."""

    kind: str
    message: str
    time: float
    values: dict[str, object] = field(default_factory=dict)


class Alerts:
    """`send` raises if the alert was not delivered; it is tried `attempts` times with growing pauses, then dropped."""

    def __init__(self, send: Send | None = None, *, attempts: int = 5, first_delay_s: float = _FIRST_DELAY_S) -> None:
        self._send = send
        self._attempts = attempts
        self._first_delay_s = first_delay_s
        self._waiting: deque[Alert] = deque(maxlen=MAX_WAITING)  # a dead webhook costs the oldest alerts, not memory
        self._task: asyncio.Task[None] | None = None

    def __call__(self, alert: Alert) -> None:
        log.warning(alert.message, extra={"alert": alert.kind, **alert.values})
        if self._send is not None:
            self._waiting.append(alert)
            if self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._deliver(), name="minserve-alerts")

    async def close(self, timeout: float = 2.0) -> None:
        """Give what is waiting a last moment. Idempotent."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=timeout)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _deliver(self) -> None:
        while self._waiting:
            await self._try(self._waiting.popleft())

    async def _try(self, alert: Alert) -> None:
        send = self._send
        assert send is not None
        delay = self._first_delay_s
        for attempt in range(1, self._attempts + 1):
            try:
                await send(asdict(alert))
                return
            except Exception as error:
                log.warning("alert webhook: attempt %d of %d failed: %s", attempt, self._attempts, error)
            if attempt < self._attempts:
                await asyncio.sleep(delay)
                delay = min(2 * delay, _MAX_DELAY_S)
