"""Which tokens of which requests the next step computes: the scheduling policy, one pure function.

No clock, no arrays, no state: Views and Limits in, a StepPlan out. Write your own and hand it to the Scheduler.

The rules, in the order in which they are applied:

1. Pools in order (interactive, bulk); in a pool those who decode, then prompts: running ones and admissions together,
   lower priority first, then arrival (see `order`).
2. Everybody who decodes gets a token in every step. Prompt tokens are capped while anybody decodes.
3. A prompt takes at most half of the prompt tokens that are left while others stand behind it; what nobody took goes to
   the first ones. So a long prompt neither holds up short ones nor is held up by them.
4. Who can't be admitted is passed by smaller ones, in a bounded number of steps; then nobody passes until it fits.
5. Seats, prompt tokens and blocks promised to a pool are left to it as soon as it wants them, and lent until then.
6. No block left: the last in order of the lowest pool that has no chunk in this plan goes back to the queue. One that
   finds no victim waits a step with its blocks; one that is alone ends.
7. Drafts get what is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minserve.policy.limits import Limits, PoolLimits
from minserve.policy.room import MAX_SKIPS, MAX_SKIPS_BELOW, RANK, Room, order
from minserve.request import Chunk, Pool, StepPlan, View

__all__ = ["Limits", "PlanFunction", "PoolLimits", "order", "plan_step"]

STUCK = ("blocks", "pool_share")  # reasons to wait that smaller requests may not share

PlanFunction = Callable[[int, Sequence[View], Sequence[View], int, Limits], StepPlan]


def plan_step(
    step: int, running: Sequence[View], waiting: Sequence[View], free_blocks: int, limits: Limits
) -> StepPlan:
    """Decide one step. `free_blocks` counts blocks that nobody holds, cached ones included; changes nothing."""
    plan = _Planner(step, running, waiting, free_blocks, limits)
    for pool in Pool:
        plan.decode(pool)
        plan.prompts(pool)
    plan.hand_out_rest()
    return plan.result()


@dataclass(slots=True)
class _Grant:
    """What a request gets in this step, while the plan is being made."""

    view: View
    count: int = 0
    draft: tuple[int, ...] = ()
    forks: list[str] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.view.computed + self.count

    @property
    def samples(self) -> bool:
        """The chunk reaches the end of the known tokens, and another one is wanted."""
        return self.end == self.view.known < self.view.limit


class _Planner:
    def __init__(
        self, step: int, running: Sequence[View], waiting: Sequence[View], free_blocks: int, limits: Limits
    ) -> None:
        self.step = step
        self.limits = limits
        self.exhausted = [v.id for v in waiting if v.known > limits.capacity]
        waiting = [v for v in waiting if v.known <= limits.capacity]
        self.alone = len(running) == 1
        self.room = Room(running, waiting, free_blocks, limits)
        self.decoding: dict[Pool, list[View]] = {pool: [] for pool in Pool}
        self.prompt: dict[Pool, list[View]] = {pool: [] for pool in Pool}
        for view in sorted(running, key=order):
            (self.decoding if view.known - view.computed == 1 else self.prompt)[view.pool].append(view)
        self.waiting: dict[Pool, list[View]] = {pool: [] for pool in Pool}
        for view in sorted(waiting, key=order):
            self.waiting[view.pool].append(view)
        decodes = sum(len(views) for views in self.decoding.values())
        self.decode_tokens = min(decodes, limits.max_step_tokens)
        self.budget = limits.max_step_tokens - self.decode_tokens
        if decodes:
            self.budget = min(self.budget, limits.chunk_tokens)
        self.step_budget = self.budget
        # Every seat in use keeps a row; what is beyond them may go to scored rows and drafts.
        forks = sum(len(view.forks) for view in (*running, *waiting))
        self.spare_rows = self.rows = max(
            0, limits.max_rows - min(limits.max_seqs, len(running) + len(waiting) + forks)
        )
        self.grants: dict[str, _Grant] = {}
        self.admitted: list[str] = []
        self.refused: dict[str, str] = {}
        self.closed = self._closed_above()

    # -- rule 2

    def decode(self, pool: Pool) -> None:
        for view in self.decoding[pool]:
            if not self.decode_tokens:
                return
            if not self.room.runs(view):
                continue
            if not self.extend(view, 1) and (self.alone or view.known > self.limits.capacity):
                self.exhausted.append(view.id)
            self.decode_tokens -= 1

    # -- rules 3 and 4

    def prompts(self, pool: Pool) -> None:
        """Running prompts and admissions of one pool, in order, within the pool's part of the prompt tokens."""
        line = sorted(self.prompt[pool] + self.waiting[pool], key=order)
        budget = mine = self.budget - self._promised_below(pool)
        for place, view in enumerate(line, start=1):
            if not self.room.runs(view) and not self._admit(view, budget):
                continue
            share = budget if place == len(line) else max(self.limits.block_size, budget // 2)
            budget -= self.extend(view, min(share, budget))
        self.budget -= mine - budget
        self._top_up(line, budget)

    def hand_out_rest(self) -> None:
        """Tokens that were kept for a lower pool in vain go to prompts; drafts get what nobody else could use."""
        for pool in Pool:
            self._top_up(self.prompt[pool] + self.waiting[pool], self.budget)
        tokens = self.limits.max_step_tokens - sum(grant.count for grant in self.grants.values())
        for grant in self.grants.values():
            if grant.view.draft and grant.samples and not grant.forks:
                tokens -= self._draft(grant, tokens)

    def extend(self, view: View, count: int) -> int:
        """Give a request up to `count` more tokens, as far as rows and blocks go; returns how many it got."""
        grant = self.grants.get(view.id) or _Grant(view)
        start = grant.end
        end = min(start + count, view.known)
        if end <= start:
            return 0
        if view.scored[1] > start:
            end = self._rows_reach(grant, end)
        end = self.room.cover(view, start, end)
        if end <= start:
            return 0
        self.grants[view.id] = grant
        before = self._extra_rows(grant)
        grant.count = end - view.computed
        self.rows -= self._extra_rows(grant) - before
        if grant.samples and view.forks:
            self._fork(grant)
        return end - start

    def result(self) -> StepPlan:
        return StepPlan(
            step=self.step,
            chunks=tuple(_chunk(grant) for grant in self.grants.values()),
            admitted=(*self.admitted, *(fork for grant in self.grants.values() for fork in grant.forks)),
            preempted=tuple(self.room.preempted),
            exhausted=tuple(self.exhausted),
            skipped=tuple(view.id for pool in Pool for view in self._overtaken(pool)),
            waits=Counter(self.refused.values()),
        )

    # -- admissions

    def _admit(self, view: View, budget: int) -> bool:
        if view.id in self.room.preempted:
            return False
        reason = self._refusal(view, budget)
        if reason is None:
            self.room.admit(view)
            self.admitted.append(view.id)
            return True
        self.refused[view.id] = reason
        if reason in STUCK and view.skips >= MAX_SKIPS:
            self.closed.update({pool: reason for pool in Pool if RANK[pool] >= RANK[view.pool]})
        return False

    def _refusal(self, view: View, budget: int) -> str | None:
        if view.pool in self.closed:
            return self.closed[view.pool]
        if budget <= 0:
            return "step_budget"
        if view.scored[1] > view.computed and self.rows == 0 < self.spare_rows:
            return "rows"
        return self.room.refusal(view)

    def _closed_above(self) -> dict[Pool, str]:
        """Pools that admit nobody because a lower one, with nothing running, was overtaken too often."""
        closed: dict[Pool, str] = {}
        for pool, views in self.waiting.items():
            if views and views[0].skips >= MAX_SKIPS_BELOW and not self.room.seats[pool]:
                closed.update({above: "pool_share" for above in Pool if RANK[above] < RANK[pool]})
        return closed

    def _overtaken(self, pool: Pool) -> list[View]:
        """Waiting requests that did not fit while a later one of their pool, or one of a higher pool, came in."""
        line, admitted = self.waiting[pool], set(self.admitted)
        last = max((place for place, view in enumerate(line) if view.id in admitted), default=-1)
        passed = [view for view in line[:last] if self.refused.get(view.id) in STUCK]
        above = any(v.id in admitted for p in Pool if RANK[p] < RANK[pool] for v in self.waiting[p])
        if line and above and not passed and not self.room.seats[pool]:
            passed = line[:1]
        return passed

    def _promised_below(self, pool: Pool) -> int:
        """Prompt tokens that lower pools were promised and want."""
        promised = 0
        for below in Pool:
            if RANK[below] > RANK[pool]:
                wanting = [v for v in self.waiting[below] if not v.blocked] + self.prompt[below]
                wanted = sum(view.known - view.computed for view in wanting)
                promised += min(wanted, self.limits.promised_tokens(below, self.step_budget, self.step))
        return min(promised, self.budget)

    # -- what a request gets

    def _top_up(self, line: Sequence[View], budget: int) -> None:
        for view in line:
            if budget > 0 and view.id in self.grants:
                got = self.extend(view, budget)
                budget -= got
                self.budget -= got

    def _fork(self, grant: _Grant) -> None:
        for sibling in grant.view.forks:
            if not self.room.fork(grant.view):
                return
            grant.forks.append(sibling)

    def _draft(self, grant: _Grant, tokens: int) -> int:
        view = grant.view
        count = min(len(view.draft), tokens, self.rows, view.limit - view.known - 1)
        if count > 0:
            count = self.room.cover_spare(view, view.known + count) - view.known
        if count > 0:
            grant.draft = view.draft[:count]
            self.rows -= count
        return len(grant.draft)

    def _rows_reach(self, grant: _Grant, end: int) -> int:
        """How far the chunk may go so that its logit rows fit: its own one and what is left of the others."""
        first = max(grant.view.computed, grant.view.scored[0])
        allowed = 1 + self._extra_rows(grant) + self.rows
        wanted = _scored(grant.view, end) + (end == grant.view.known < grant.view.limit)
        return end if wanted <= allowed else min(end, first + allowed)

    def _extra_rows(self, grant: _Grant) -> int:
        """Logit rows of the chunk beyond the one that every seat keeps."""
        return max(0, _scored(grant.view, grant.end) + grant.samples - 1)


def _scored(view: View, end: int) -> int:
    """Rows to score in a chunk of this request that ends at `end`."""
    return max(0, min(end, view.scored[1]) - max(view.computed, view.scored[0]))


def _chunk(grant: _Grant) -> Chunk:
    view, drafts = grant.view, len(grant.draft)
    return Chunk(
        request_id=view.id,
        start=view.computed,
        count=grant.count + drafts,
        samples=1 + drafts if grant.samples else 0,
        draft=grant.draft,
        scored=_scored(view, grant.end),
        forks=tuple(grant.forks),
    )
