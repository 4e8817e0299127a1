"""The books of a step that is being planned: its logit rows, beyond the one that every seat in use keeps.

Pure: counts from Views. It must not know tokens and blocks, nor in which order requests ask.
"""

from __future__ import annotations

from collections.abc import Sequence

from minserve.policy.limits import Limits
from minserve.policy.part import Part
from minserve.request import View


class Rows:
    """left: those that scored rows and drafts may still take."""

    def __init__(self, running: Sequence[View], waiting: Sequence[View], limits: Limits) -> None:
        forks = sum(len(view.forks) for view in (*running, *waiting))
        seats = min(limits.max_seqs, len(running) + len(waiting) + forks)
        self.left = self._all = max(0, limits.max_rows - seats)

    def refuses(self, view: View) -> bool:
        """It would score rows, and others took them all."""
        return view.scored[1] > view.computed and self.left == 0 < self._all

    def reach(self, part: Part, end: int) -> int:
        """How far a chunk up to `end` may go: its own row and what is left of the others."""
        allowed = 1 + part.extra_rows(part.end) + self.left
        if part.extra_rows(end) < allowed:
            return end
        return min(end, max(part.view.computed, part.view.scored[0]) + allowed)

    def take(self, part: Part, end: int) -> None:
        """A chunk grows up to `end`."""
        self.left += part.extra_rows(part.end) - part.extra_rows(end)
