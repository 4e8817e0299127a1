"""Wall-clock time that never goes back nor stands still.

Owns nothing but the last time it gave out. Budgets need wall time (a calendar day survives a restart), but a clock set
back would open a window a second time, and what came after a row, or a reset, must be later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# A ledger whose last row lies further ahead than this was written under a wrong clock; its time is not continued.
BELIEVABLE_S = 86400.0


class SteadyClock:
    """Unix seconds, later each time.

    Follows the system clock forward (a laptop wakes up). After the system clock was set back it runs at half speed
    until real time has caught up: nothing stops, and no window is seen twice.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        floor: float = 0.0,
    ) -> None:
        """floor: a time this clock already showed before a restart."""
        self._wall = wall
        self._monotonic = monotonic
        now = wall()
        self._last = floor if now < floor <= now + BELIEVABLE_S else now
        self._last_monotonic = monotonic()

    def __call__(self) -> float:
        wall, monotonic = self._wall(), self._monotonic()
        if wall <= self._last:
            wall = math.nextafter(self._last + max(0.0, monotonic - self._last_monotonic) / 2, math.inf)
        self._last, self._last_monotonic = wall, monotonic
        return wall
