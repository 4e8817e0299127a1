"""Asking the policy: it sees a View of every running request and of the first ones that wait.

Owns nothing; reads requests, the cache and the lines. It must not change any of them, nor know a policy's rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import islice

from minserve.cache import Cache, unscored
from minserve.policy.limits import Limits
from minserve.policy.order import POOLS, RANK
from minserve.policy.schedule import PlanFunction
from minserve.request import Request, StepPlan, View
from minserve.waiting import Place, Waiting, place

WINDOW = 4  # requests of a pool that can be seen beyond the free seats

Turn = tuple[int, Place]  # the pool's rank, then the place in its line
Frontier = dict[bytes, Turn]  # key of a block that is being computed -> turn of who does it


class Views:
    """requests: all live ones by id. step: the one that is planned."""

    def __init__(self, requests: Mapping[str, Request], waiting: Waiting, cache: Cache, step: int) -> None:
        self._requests = requests
        self._lines = waiting
        self._cache = cache
        self._step = step

    def ask(
        self, policy: PlanFunction, running: Collection[Request], prompts: Iterable[Request], limits: Limits
    ) -> StepPlan:
        """The policy's plan. Where two admissions would compute the same block, the later one waits: ask again.

        prompts: those of `running` that are read now.
        """
        views, free = self._running(running), self._cache.blocks.available
        if not self._lines.anybody:
            return policy(self._step, views, (), free, limits)
        frontier = self._frontier(prompts)
        window = self._window(frontier, max(0, limits.max_seqs - len(running)))
        while True:
            plan = policy(self._step, views, window, free, limits)
            chosen = set(plan.admitted)
            admitted = [self._requests[view.id] for view in window if view.id in chosen]
            rivals = self._rivals(admitted, frontier)
            if not rivals:
                break
            window = [view._replace(blocked=True) if view.id in rivals else view for view in window]
        waits = Counter(plan.waits)
        waits["queue"] += self._lines.in_line.total() - len(window)
        waits["group"] += self._lines.beside.total() - (len(plan.admitted) - len(admitted))
        return replace(plan, waits=dict(+waits))

    def _running(self, requests: Iterable[Request]) -> list[View]:
        owned = self._cache.blocks.owned
        return [self._view(r, r.computed, len(r.blocks), own_blocks=owned(r.blocks)) for r in requests]

    def _window(self, frontier: Frontier, free_seats: int) -> list[View]:
        """The first of each line: as many as could be admitted, a few to pass them, and some of those who are blocked.

        So a long queue costs a step no more than a short one.
        """
        views: list[View] = []
        for pool in POOLS:
            most = WINDOW + free_seats
            for request in islice(self._lines.line(pool), 4 * most):
                view = self._waiting(request, frontier)
                views.append(view)
                most -= not view.blocked
                if not most:
                    break
        return views

    def _frontier(self, prompts: Iterable[Request]) -> Frontier:
        """Blocks that these running prompts are about to fill."""
        keys: Frontier = {}
        for request in prompts:
            self._claim(keys, request, request.computed // self._cache.block_size)
        return keys

    def _rivals(self, admitted: Iterable[Request], frontier: Frontier) -> set[str]:
        """Who of the admitted would compute the same block as another one: all but the first of each."""
        keys, rivals = dict(frontier), set()
        for request in admitted:
            hit = self._cache.hit_blocks(request)
            if not unscored(request) and self._is_claimed(keys, request, hit):
                rivals.add(request.id)
            else:
                self._claim(keys, request, hit)
        return rivals

    def _claim(self, keys: Frontier, request: Request, blocks: int) -> None:
        key = self._cache.next_key(request, blocks)
        if key is not None:
            keys[key] = min(_turn(request), keys.get(key, _turn(request)))

    def _is_claimed(self, keys: Frontier, request: Request, blocks: int) -> bool:
        """By somebody who goes first anyway: nobody waits for who stands behind it."""
        key = self._cache.next_key(request, blocks)
        return key is not None and key in keys and keys[key] < _turn(request)

    def _waiting(self, request: Request, frontier: Frontier) -> View:
        hit = self._cache.hit_blocks(request)
        free_hits = self._cache.unheld(request, hit)
        blocked = not unscored(request) and self._is_claimed(frontier, request, hit)
        return self._view(request, hit * self._cache.block_size, hit, free_hits=free_hits, blocked=blocked)

    def _view(
        self,
        request: Request,
        computed: int,
        blocks: int,
        own_blocks: int = 0,
        free_hits: int = 0,
        blocked: bool = False,
    ) -> View:
        return View(
            request.id,
            len(request.tokens),
            computed,
            blocks,
            own_blocks,
            request.pool,
            request.priority,
            request.arrival,
            self._step - request.since,
            request.preemptions,
            request.limit,
            request.prompt_len,
            request.skips,
            free_hits,
            blocked,
            self._lines.followers(request),
            (request.scored, request.prompt_len - 1) if unscored(request) else (0, 0),
        )


def _turn(request: Request) -> Turn:
    return RANK[request.pool], place(request)
