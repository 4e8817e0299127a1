"""A token bucket: how often something may happen, a burst included.

Owns one number and a time. It must not know what it allows.
"""

from __future__ import annotations


class Allowance:
    """`burst` at once, `rate` a second in the long run."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = float(burst), 0.0

    def take(self, now: float) -> bool:
        """Whether it may happen now; if so, it has. now: seconds, never decreasing."""
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
