"""Which tokens of which requests the next step computes: the scheduling policy, one pure function.

No clock, no arrays, no state: Views and Limits in, a StepPlan out. Write your own and hand it to the Scheduler.

The rules, in the order in which they are applied:

1. Pools in order (interactive, bulk); in a pool those who decode, then prompts: running ones and admissions together,
   lower priority first, then arrival (see `order`).
2. Everybody who decodes gets a token in every step, and prompt tokens are capped while anybody decodes. But in a step
   that reads a higher pool's prompt, lower pools' decodes rest, unless they still have to make up for two rests, and
   their prompts get what they were promised. While a higher pool decodes, a lower one decodes in even steps and reads
   prompts in odd ones, half of the cap. So neither first tokens nor later ones wait long for lower pools.
3. A prompt takes what is left if that ends it, else at most half of it while others stand behind; what nobody took goes
   to the first ones. So a long prompt neither holds up short ones nor is held up by them. Generated tokens, read again
   after a preemption, come in a chunk after the prompt's last.
4. Who can't be admitted is passed by smaller ones, in a bounded number of steps; then nobody passes until it fits.
5. Seats, prompt tokens and blocks promised to a pool are left to it as soon as it wants them, and lent until then.
6. No block left: the last in order of the lowest pool that has no chunk in this plan goes back to the queue. One that
   finds no victim waits a step with its blocks; one that is alone ends.
7. Drafts get what is left.
8. A paused pool gets nothing. What it holds is lent like anything beyond a promise.

Books of a step: tokens in budget.py and turns.py, seats and blocks in room.py, logit rows in rows.py, who waits in
queue.py. Who goes before whom: order.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from minserve.policy.budget import Budget
from minserve.policy.limits import Limits
from minserve.policy.order import POOLS, order
from minserve.policy.part import Part
from minserve.policy.queue import Queue
from minserve.policy.room import Room
from minserve.policy.rows import Rows
from minserve.policy.steady import steady
from minserve.request import Pool, StepPlan, View, WaitReason

PlanFunction = Callable[[int, Sequence[View], Sequence[View], int, Limits], StepPlan]


def plan_step(
    step: int, running: Sequence[View], waiting: Sequence[View], free_blocks: int, limits: Limits
) -> StepPlan:
    """Decide one step. `free_blocks` counts blocks that nobody holds, cached ones included; changes nothing."""
    chunks = None if waiting else steady(running, free_blocks, limits)
    if chunks is not None:
        return StepPlan(step, chunks)
    return deliberate(step, running, waiting, free_blocks, limits)


def deliberate(
    step: int, running: Sequence[View], waiting: Sequence[View], free_blocks: int, limits: Limits
) -> StepPlan:
    """The rules, one by one."""
    plan = _Planner(step, running, waiting, free_blocks, limits)
    for pool in POOLS:
        if plan.decoding[pool] or plan.prompt[pool] or plan.waiting[pool]:
            plan.serve(pool)
    plan.hand_out_rest()
    return plan.result()


def _by_pool(views: Iterable[View]) -> dict[Pool, list[View]]:
    lines: dict[Pool, list[View]] = {pool: [] for pool in POOLS}
    for view in sorted(views, key=order):
        lines[view.pool].append(view)
    return lines


class _Planner:
    def __init__(
        self, step: int, running: Sequence[View], waiting: Sequence[View], free_blocks: int, limits: Limits
    ) -> None:
        self.step, self.limits = step, limits
        waiting = sorted(waiting, key=order)
        self.exhausted = [view.id for view in waiting if view.known > limits.capacity]
        waiting = [view for view in waiting if view.known <= limits.capacity]
        self.paused = sum(view.pool in limits.paused for view in waiting)
        waiting = [view for view in waiting if view.pool not in limits.paused]
        self.alone = len(running) == 1
        self.room = Room(running, waiting, free_blocks, limits)
        served = [view for view in running if view.pool not in limits.paused]
        self.decoding = _by_pool(view for view in served if view.known - view.computed == 1)
        self.prompt = _by_pool(view for view in served if view.known - view.computed != 1)
        self.waiting = _by_pool(waiting)
        wanting = {pool: self.prompt[pool] + [v for v in self.waiting[pool] if not v.blocked] for pool in POOLS}
        self.budget = Budget(self.decoding, wanting, step, limits)
        self.rows = Rows(running, waiting, limits)
        self.queue = Queue(self.waiting, self.room, self.budget, self.rows)
        self.rested: list[View] = []  # decodes without their token because of a higher pool's prompt
        self.granted: list[Part] = []  # those with a chunk, in the order of the plan

    # -- rule 2

    def serve(self, pool: Pool) -> None:
        """A pool's decodes and prompts, now that higher pools have what they want."""
        budget, read = self.budget, self.budget.read > 0
        if read and pool in budget.resting:
            self.rested += self.decoding[pool]
        elif not read and pool in budget.reading and self._read(pool):
            return
        else:
            if pool in budget.resting | budget.reading:
                budget.wake(pool, self._taken())
            self._decode(pool)
        if read:
            budget.cap_at_kept(pool)
        self._read(pool)

    def _decode(self, pool: Pool) -> None:
        for view in self.decoding[pool]:
            part = self.room.parts.get(view.id)
            if part is not None and self.budget.decodes:
                self.budget.decodes -= 1
                if not self._grant(part, 1) and self.alone:
                    self.exhausted.append(view.id)

    # -- rules 3, 4 and 5

    def _read(self, pool: Pool) -> bool:
        """Running prompts and admissions of one pool, in order; what lower pools were promised is kept for them.

        False if there was nothing to read.
        """
        before = self.budget.read
        kept = self.budget.keep_for_lower(pool)
        self._share_out(pool)
        self.budget.give_back(kept)
        return self.budget.read > before

    def hand_out_rest(self) -> None:
        """Prompt tokens that were kept in vain go round again; drafts get what nobody else could use."""
        if self.budget.kept and not self.budget.spent:
            for pool in POOLS:
                self._share_out(pool)
        tokens = self.limits.max_step_tokens - self._taken()
        for part in self.granted:
            if part.view.draft and part.samples and not part.forks:
                tokens -= self._draft(part, tokens)

    def _share_out(self, pool: Pool) -> None:
        """All that is left for who ends with it, half for others while somebody stands behind; then what remained."""
        line = sorted(self.prompt[pool] + self.waiting[pool], key=order)
        for place, view in enumerate(line, start=1):
            if view.id in self.room.parts or self.queue.admit(view):
                left = self.budget.left(pool)
                ends = view.known - view.computed <= left
                self._extend(view, left if ends or place == len(line) else max(self.limits.block_size, left // 2))
        for view in line:
            if view.id in self.room.parts:
                self._extend(view, self.budget.left(pool))

    def _extend(self, view: View, count: int) -> None:
        """Up to `count` more prompt tokens, as far as the pool has any."""
        granted = self._grant(self.room.parts[view.id], min(count, self.budget.left(view.pool)))
        self.budget.take(view.pool, granted)

    def _taken(self) -> int:
        """Tokens that the step has by now, drafts not counted."""
        return sum(part.count for part in self.granted)

    def _grant(self, part: Part, count: int) -> int:
        """Up to `count` more tokens, as far as rows and blocks go; returns how many it got."""
        view, start = part.view, part.end
        end = min(start + count, part.most)
        if end <= start:
            return 0
        scores = view.scored[1] > view.computed
        if scores:
            end = self.rows.reach(part, end)
        end = self.room.cover(part, end)
        if end <= start:
            return 0
        if not part.count:
            self.granted.append(part)
        if scores:
            self.rows.take(part, end)
        part.count = end - view.computed
        if view.forks and part.samples:
            self._fork(part)
        return end - start

    def result(self) -> StepPlan:
        return StepPlan(
            step=self.step,
            chunks=tuple(part.chunk() for part in self.granted),
            admitted=(*self.queue.admitted, *(fork for part in self.granted for fork in part.forks)),
            preempted=tuple(self.room.preempted),
            exhausted=tuple(self.exhausted),
            skipped=tuple(view.id for view in self._skipped()),
            waits=self.queue.waits + Counter[WaitReason]({"paused": self.paused}),
        )

    def _skipped(self) -> list[View]:
        resting = [view for view in self.rested if view.id in self.room.parts]
        return resting + [view for pool in POOLS for view in self.queue.overtaken(pool)]

    # -- what a request gets

    def _fork(self, part: Part) -> None:
        for sibling in part.view.forks:
            if not self.room.fork(part.view):
                return
            part.forks += (sibling,)

    def _draft(self, part: Part, tokens: int) -> int:
        view = part.view
        count = min(len(view.draft), tokens, self.rows.left, view.limit - view.known - 1)
        if count > 0:
            count = self.room.cover_spare(part, view.known + count) - view.known
            part.draft = view.draft[:count]
            self.rows.left -= count
        return len(part.draft)
