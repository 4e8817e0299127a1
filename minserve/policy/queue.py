"""Who waits while a step is planned: who gets in, why the others don't, and who was overtaken by that.

Owns rule 4 of schedule.py. Pure. It must not know what a running request gets of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from minserve.policy.budget import Budget
from minserve.policy.order import MAX_SKIPS, POOLS, RANK, Lines, starving
from minserve.policy.room import Room
from minserve.policy.rows import Rows
from minserve.request import Pool, View, WaitReason

STUCK: tuple[WaitReason, ...] = ("blocks", "pool_share")  # reasons to wait that smaller requests may not share


class Queue:
    """admitted: ids, in the order in which they came in."""

    def __init__(self, lines: Lines, room: Room, budget: Budget, rows: Rows) -> None:
        """lines: who may come in."""
        self.admitted: list[str] = []
        self._lines, self._room, self._budget, self._rows = lines, room, budget, rows
        self._refused: dict[str, WaitReason] = {}  # id -> why
        self._closed = self._closed_above()

    @property
    def waits(self) -> Counter[WaitReason]:
        """Why requests still wait."""
        return Counter(self._refused.values())

    def admit(self, view: View) -> bool:
        if view.id in self._room.preempted:
            return False
        closed = self._closed.get(view.pool)
        reason = closed or self._refusal(view)
        if reason is None:
            self._room.admit(view)
            self.admitted.append(view.id)
            self._refused.pop(view.id, None)
            return True
        if self._refused.get(view.id) not in STUCK:  # who was passed in the first round stays so
            self._refused[view.id] = reason
        if reason == "seats":  # what the first can't have, nobody behind it gets
            self._closed[view.pool] = reason
        elif not closed and reason in STUCK and view.skips >= MAX_SKIPS:
            self._closed.update({pool: reason for pool in POOLS if RANK[pool] >= RANK[view.pool]})
        return False

    def _refusal(self, view: View) -> WaitReason | None:
        if self._budget.left(view.pool) <= 0:
            return "step_budget"
        if self._rows.refuses(view):
            return "rows"
        return self._room.refusal(view)

    def _closed_above(self) -> dict[Pool, WaitReason]:
        """Pools that admit nobody because a lower one, with nothing running, was overtaken too often."""
        closed: dict[Pool, WaitReason] = {}
        for pool, views in self._lines.items():
            if views and starving(views[0]) and not self._room.seats[pool]:
                closed.update({above: "pool_share" for above in POOLS if RANK[above] < RANK[pool]})
        return closed

    def overtaken(self, pool: Pool) -> Sequence[View]:
        """Who did not fit while a later one of its pool, or one of a higher pool, came in."""
        if not self.admitted:
            return ()
        line, admitted = self._lines[pool], set(self.admitted)
        last = max((place for place, view in enumerate(line) if view.id in admitted), default=-1)
        passed = [view for view in line[:last] if self._refused.get(view.id) in STUCK]
        above = any(v.id in admitted for p in POOLS if RANK[p] < RANK[pool] for v in self._lines[p])
        if line and above and not passed and not self._room.seats[pool]:
            return line[:1]
        return passed
