"""The books of a step that is being planned: seats and blocks that are left, and who may take them.

Pure: counts from Views, nothing else. It must not know how many tokens a step has, nor in which order requests ask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from minserve.policy.limits import Limits
from minserve.policy.order import MAX_PREEMPTIONS, POOLS, RANK, order, starving
from minserve.policy.part import Part
from minserve.request import Pool, View, WaitReason


class Room:
    """parts: running requests, admitted ones included, by id. free: blocks nobody holds. seats: taken, per pool."""

    def __init__(self, running: Sequence[View], waiting: Sequence[View], free_blocks: int, limits: Limits) -> None:
        self.limits = limits
        self.parts: dict[str, Part] = {}
        self.preempted: dict[str, None] = {}
        self.free = free_blocks
        self.seats: Counter[Pool] = Counter()
        self._used: Counter[Pool] = Counter()  # blocks held alone, and debt
        self._debts = 0
        # Views count blocks, they don't name them. So where an admission shares blocks with a victim, assume the worst:
        self._freed = 0  # by preemption: the next admission may have counted them as held
        self._shared = 0  # with running requests: the next victim may keep them from being freed
        for view in running:
            self._enter(view, view.own_blocks)
        self._wanting = {v.id: v for v in waiting if not v.blocked}

    # -- running requests grow

    def cover(self, part: Part, end: int) -> int:
        """Take blocks for the rows up to `end` and return how far they reach.

        Preempts others only if there is not a single row otherwise; even then it may be none.
        """
        size = self.limits.block_size
        if end <= part.held * size:
            return end
        while (part.held + self.free) * size <= part.end:
            victim = self._victim(part)
            if victim is None:
                return part.end
            self._preempt(victim)
        return self._take(part, end, self.free)

    def cover_spare(self, part: Part, end: int) -> int:
        """Like cover, but with blocks that nobody will miss."""
        return self._take(part, end, self.free - self._debts - self.limits.watermark_blocks)

    # -- waiting requests come in

    def refusal(self, view: View) -> WaitReason | None:
        """Why this request can't start now, or None: then there is room, made by preempting lower pools if need be."""
        if view.blocked:
            return "prefix"
        if not self.parts:
            return None  # whatever was accepted fits into an empty cache
        if self.seats[view.pool] >= self.limits.pools[view.pool].max_seqs:
            return "seats"
        promises, freed = not starving(view), self._freed
        seats, blocks = self._seats_left(view.pool, promises), self._blocks_left(view.pool, promises)
        victims: list[Part] = []
        for victim in self._lenders(view):
            short = seats < 1, blocks < self._cost(view, freed)
            if not any(short):
                break
            if not promises or self._lends(victim, victims, *short):
                victims.append(victim)
                seats += 1
                freed += self._freed_by(victim)
                blocks += self._freed_by(victim) + victim.debt
        if seats < 1:
            return "seats" if self._seats_left(view.pool, promises=False) < 1 else "pool_share"
        cost = self._cost(view, freed)
        if blocks < cost:
            return "blocks" if self._blocks_left(view.pool, promises=False) < cost else "pool_share"
        for victim in victims:
            self._preempt(victim)
        return None

    def admit(self, view: View) -> None:
        del self._wanting[view.id]
        found = self._found(view, self._freed)
        self.free -= found
        self._freed -= found - view.free_hits
        self._shared += view.blocks - view.free_hits
        self._enter(view, found)

    def fork(self, view: View) -> bool:
        """A seat for a sibling that shares the full blocks of `view` and gets a copy of the last, partial one."""
        pool, blocks = view.pool, 1 if view.known % self.limits.block_size else 0
        seats = min(self._seats_left(pool), self.limits.pools[pool].max_seqs - self.seats[pool])
        if seats < 1 or self._blocks_left(pool) < blocks:
            return False
        self.seats[pool] += 1
        self.free -= blocks
        self._used[pool] += blocks
        return True

    # -- the books

    def _enter(self, view: View, own: int) -> None:
        """A running request, with so many blocks that nobody else holds."""
        debt = max(0, self._goal(view) - view.blocks)
        self.parts[view.id] = Part(view, view.blocks, debt)
        self.seats[view.pool] += 1
        self._used[view.pool] += own + debt
        self._debts += debt

    def _take(self, part: Part, end: int, most: int) -> int:
        """Up to `most` blocks for the rows up to `end`; returns how far the request's blocks reach then."""
        taken = max(0, min(self.limits.blocks_for(end) - part.held, most))
        paid = min(taken, part.debt)
        self.free -= taken
        part.held += taken
        part.debt -= paid
        self._debts -= paid
        self._used[part.view.pool] += taken - paid
        return min(end, part.held * self.limits.block_size)

    def _preempt(self, victim: Part) -> None:
        view, freed = victim.view, self._freed_by(victim)
        del self.parts[view.id]
        self.preempted[view.id] = None
        self.seats[view.pool] -= 1
        self.free += freed
        self._freed += freed
        self._shared = max(0, self._shared - view.own_blocks)
        self._used[view.pool] -= view.own_blocks + victim.debt
        self._debts -= victim.debt

    def _goal(self, view: View) -> int:
        """Blocks a request holds when it has come as far as it must be sure to come."""
        tokens = view.known
        if view.preemptions >= MAX_PREEMPTIONS:
            tokens = max(tokens, view.limit - 1)  # the last token is never computed
        return min(self.limits.blocks_for(tokens), self.limits.num_blocks)

    def _found(self, view: View, freed: int) -> int:
        """Blocks found in the index that count as free."""
        return view.free_hits + min(view.blocks - view.free_hits, freed)

    def _cost(self, view: View, freed: int) -> int:
        """Free blocks that admitting this request takes, now or later."""
        return self._found(view, freed) + max(0, self._goal(view) - view.blocks)

    def _freed_by(self, victim: Part) -> int:
        """Blocks that preempting this request surely frees."""
        return max(0, victim.view.own_blocks - self._shared)

    def _seats_left(self, pool: Pool, promises: bool = True) -> int:
        """For one more admission. promises: without what other pools were promised and want."""
        left = self.limits.max_seqs - self.seats.total()
        if promises:
            for other, wanting in self._others(pool).items():
                left -= min(len(wanting), max(0, self.limits.promised_seats(other) - self.seats[other]))
        return left

    def _blocks_left(self, pool: Pool, promises: bool = True) -> int:
        left = self.free - self._debts - self.limits.watermark_blocks
        if promises:
            for other, wanting in self._others(pool).items():
                wanted = sum(self._cost(view, 0) for view in wanting)
                left -= min(wanted, max(0, self.limits.promised_blocks(other) - self._used[other]))
        return left

    def _others(self, pool: Pool) -> dict[Pool, list[View]]:
        """Who waits in the other pools."""
        return {
            other: [view for view in self._wanting.values() if view.pool is other]
            for other in POOLS
            if other is not pool
        }

    # -- who makes room

    def _victim(self, part: Part) -> Part | None:
        """The last in order of the lowest pool that holds more than it was promised, or the last behind `part` in its
        own. Who has a chunk in this plan is spared.

        The first of a plan gets its block whatever was promised: so there is always somebody who advances.
        """
        first = not any(other.count for other in self.parts.values())
        rank, place = RANK[part.view.pool], order(part.view)

        def gives(view: View) -> bool:
            if view.pool is part.view.pool:
                return order(view) > place
            return RANK[view.pool] > rank and (first or self._used[view.pool] > self.limits.promised_blocks(view.pool))

        candidates = [p for p in self.parts.values() if not p.count and gives(p.view)]
        return max(candidates, key=lambda p: (RANK[p.view.pool], p.view.own_blocks > 0, order(p.view)), default=None)

    def _lenders(self, view: View) -> list[Part]:
        """Running requests of lower pools that an admission may preempt, last in order first."""
        below = [
            part
            for part in self.parts.values()
            if RANK[part.view.pool] > RANK[view.pool] and not part.count and part.view.preemptions < MAX_PREEMPTIONS
        ]
        return sorted(below, key=lambda part: (RANK[part.view.pool], order(part.view)), reverse=True)

    def _lends(self, victim: Part, gone: Sequence[Part], seat: bool, blocks: bool) -> bool:
        """Whether its pool has more seats, or more blocks, than it was promised, once these have gone."""
        pool = victim.view.pool
        others = [part for part in gone if part.view.pool is pool]
        used = self._used[pool] - sum(part.view.own_blocks + part.debt for part in others)
        spare_seat = self.seats[pool] - len(others) > self.limits.promised_seats(pool)
        return (seat and spare_seat) or (blocks and used > self.limits.promised_blocks(pool))
