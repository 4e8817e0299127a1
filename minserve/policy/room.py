"""The books of a step that is being planned: seats and blocks that are left, and who may take them.

Pure: counts from Views, nothing else. It must not know tokens of a step, nor in which order requests come to ask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from minserve.policy.limits import Limits
from minserve.request import Pool, View

AGE_STEPS = 64  # steps of waiting that outweigh one level of priority
MAX_SKIPS = 8  # steps in which later requests of its pool may overtake a request that doesn't fit
MAX_SKIPS_BELOW = 256  # steps in which a higher pool may overtake a pool that has nothing running
MAX_PREEMPTIONS = 3  # after these a request comes back only with room for all it may ever need

RANK = {pool: rank for rank, pool in enumerate(Pool)}  # interactive before bulk


def order(view: View) -> tuple[int, float, str]:
    """Who goes first in a pool: lower priority, then arrival; age makes up for priority, so nothing starves.

    Everybody ages alike, so two requests never change places.
    """
    return view.priority * AGE_STEPS - view.age, view.arrival, view.id


def starving(view: View) -> bool:
    """Overtaken so often that promises to others no longer hold it back."""
    return view.skips >= (MAX_SKIPS if RANK[view.pool] == 0 else MAX_SKIPS_BELOW)


class Room:
    """free: blocks nobody holds. seats: taken, per pool. A request's debt is what it needs beyond what it holds, to
    reach the end of its known tokens: admissions leave it alone, so those who run get there without preemption."""

    def __init__(self, running: Sequence[View], waiting: Sequence[View], free_blocks: int, limits: Limits) -> None:
        self.limits = limits
        self.free = free_blocks
        self.seats: Counter[Pool] = Counter()
        self.preempted: dict[str, None] = {}
        self.busy: set[str] = set()  # those with a chunk in this plan: never victims
        self._running: dict[str, View] = {}
        self._held: dict[str, int] = {}
        self._debt: dict[str, int] = {}
        self._debts = 0
        self._used: Counter[Pool] = Counter()  # blocks held alone, and debt
        for view in running:
            self._seat(view, view.own_blocks)
        self._wanted = {v.id: v for v in waiting if not v.blocked}

    # -- running requests grow

    def runs(self, view: View) -> bool:
        return view.id in self._running

    def cover(self, view: View, start: int, end: int) -> int:
        """Take blocks for rows start..end - 1 and return the end that is covered (start: none).

        Preempts others only if there is not a single row otherwise.
        """
        size = self.limits.block_size
        held = self._held[view.id]
        while (held + self.free) * size <= start:
            victim = self._victim(view)
            if victim is None:
                return start
            self._preempt(victim)
        self.busy.add(view.id)
        taken = min(max(0, self.limits.blocks_for(end) - held), self.free)
        if taken:
            self._take(view, taken)
        return min(end, (held + taken) * size)

    def cover_spare(self, view: View, end: int) -> int:
        """Like cover, but with blocks that nobody will miss. Returns the end that is covered."""
        held = self._held[view.id]
        spare = max(0, self.free - self._debts - self.limits.watermark_blocks)
        taken = min(max(0, self.limits.blocks_for(end) - held), spare)
        if taken:
            self._take(view, taken)
        return min(end, (held + taken) * self.limits.block_size)

    # -- waiting requests come in

    def refusal(self, view: View) -> str | None:
        """Why this request can't start now, or None: then there is room, made by preempting lower pools if need be."""
        if view.blocked:
            return "prefix"
        if not self._running:
            return None  # whatever was accepted fits into an empty cache
        if self.seats[view.pool] >= self.limits.pools[view.pool].max_seqs:
            return "seats"
        seats, blocks = self._seats_left(view.pool, starving(view)), self._blocks_left(view.pool, starving(view))
        cost = self._cost(view)
        victims: list[View] = []
        for victim in self._lenders(view):
            if seats >= 1 and blocks >= cost:
                break
            seat = seats < 1 and self._lent_seat(victim, victims)
            if starving(view) or seat or (blocks < cost and self._lent_blocks(victim, victims)):
                victims.append(victim)
                seats += 1
                blocks += victim.own_blocks + self._debt[victim.id]
        if seats < 1:
            return "seats" if self.limits.max_seqs <= self.seats.total() else "pool_share"
        if blocks < cost:
            return "blocks" if self._blocks_left(view.pool, True) < cost else "pool_share"
        for victim in victims:
            self._preempt(victim)
        return None

    def admit(self, view: View) -> None:
        self._wanted.pop(view.id)
        self.free -= view.free_hits
        self._seat(view, view.free_hits)

    def fork(self, view: View) -> bool:
        """A seat for a sibling that shares the full blocks of `view` and gets a copy of the last, partial one."""
        blocks = 1 if view.known % self.limits.block_size else 0
        pool = view.pool
        fits = self._seats_left(pool, False) >= 1 and self._blocks_left(pool, False) >= blocks
        if not fits or self.seats[pool] >= self.limits.pools[pool].max_seqs:
            return False
        self.seats[pool] += 1
        self.free -= blocks
        self._used[pool] += blocks
        return True

    # -- the books

    def _goal(self, view: View) -> int:
        """Blocks a request holds when it has come as far as it must be sure to come."""
        tokens = view.known
        if view.preemptions >= MAX_PREEMPTIONS:
            tokens = max(tokens, view.limit - 1)  # the last token is never computed
        return min(self.limits.blocks_for(tokens), self.limits.num_blocks)

    def _cost(self, view: View) -> int:
        """Free blocks that admitting this request takes, now or later."""
        return view.free_hits + max(0, self._goal(view) - view.blocks)

    def _seat(self, view: View, own: int) -> None:
        debt = max(0, self._goal(view) - view.blocks)
        self._running[view.id] = view
        self._held[view.id] = view.blocks
        self._debt[view.id] = debt
        self._debts += debt
        self._used[view.pool] += own + debt
        self.seats[view.pool] += 1

    def _take(self, view: View, blocks: int) -> None:
        self.free -= blocks
        self._held[view.id] += blocks
        paid = min(blocks, self._debt[view.id])
        self._debt[view.id] -= paid
        self._debts -= paid
        self._used[view.pool] += blocks - paid

    def _preempt(self, victim: View) -> None:
        del self._running[victim.id]
        debt = self._debt.pop(victim.id)
        self._debts -= debt
        self.free += victim.own_blocks
        self._used[victim.pool] -= victim.own_blocks + debt
        self.seats[victim.pool] -= 1
        self.preempted[victim.id] = None

    def _seats_left(self, pool: Pool, alone: bool) -> int:
        left = self.limits.max_seqs - self.seats.total()
        return left if alone else left - sum(self._promised_seats(other) for other in Pool if other is not pool)

    def _blocks_left(self, pool: Pool, alone: bool) -> int:
        left = self.free - self._debts - self.limits.watermark_blocks
        return left if alone else left - sum(self._promised_blocks(other) for other in Pool if other is not pool)

    def _promised_seats(self, pool: Pool) -> int:
        """Seats that the pool was promised, waits for and has not got."""
        waiting = sum(1 for view in self._wanted.values() if view.pool is pool)
        return min(waiting, max(0, self.limits.promised_seats(pool) - self.seats[pool]))

    def _promised_blocks(self, pool: Pool) -> int:
        wanted = sum(self._cost(view) for view in self._wanted.values() if view.pool is pool)
        return min(wanted, max(0, self.limits.promised_blocks(pool) - self._used[pool]))

    # -- who makes room

    def _victim(self, view: View) -> View | None:
        """The last in order of the lowest pool that holds more than its promise, or the last behind `view` in its own.

        The first of a plan gets its block whatever was promised: so there is always somebody who advances.
        """
        rank, place = RANK[view.pool], order(view)

        def gives(other: View) -> bool:
            if other.pool is view.pool:
                return order(other) > place
            promise = self.limits.promised_blocks(other.pool)
            return RANK[other.pool] > rank and (not self.busy or self._used[other.pool] > promise)

        candidates = [v for v in self._running.values() if v.id not in self.busy and v is not view and gives(v)]
        return max(candidates, key=lambda v: (RANK[v.pool], v.own_blocks > 0, order(v)), default=None)

    def _lenders(self, view: View) -> Iterator[View]:
        """Running requests of lower pools that an admission may preempt, last in order first."""
        below = [v for v in self._running.values() if RANK[v.pool] > RANK[view.pool] and v.id not in self.busy]
        lenders = [v for v in below if v.preemptions < MAX_PREEMPTIONS]
        return iter(sorted(lenders, key=lambda v: (RANK[v.pool], order(v)), reverse=True))

    def _lent_seat(self, victim: View, gone: Sequence[View]) -> bool:
        left = self.seats[victim.pool] - sum(1 for v in gone if v.pool is victim.pool)
        return left > self.limits.promised_seats(victim.pool)

    def _lent_blocks(self, victim: View, gone: Sequence[View]) -> bool:
        left = self._used[victim.pool] - sum(v.own_blocks + self._debt[v.id] for v in gone if v.pool is victim.pool)
        return left > self.limits.promised_blocks(victim.pool)
