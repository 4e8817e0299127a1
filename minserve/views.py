"""What a policy gets to see: a View of every running request and of the first ones that wait.

Owns nothing; reads requests, the cache and the lines. It must not change any of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from minserve.cache import Cache, unscored
from minserve.policy.room import POOLS, RANK
from minserve.request import Request, View
from minserve.waiting import Place, Waiting, place

WINDOW = 4  # requests of a pool that can be seen beyond the free seats

Turn = tuple[int, Place]  # the pool's rank, then the place in its line
Frontier = dict[bytes, Turn]  # key of a block that is being computed -> turn of who does it


class Views:
    def __init__(self, cache: Cache, waiting: Waiting, step: int) -> None:
        self.cache = cache
        self.waiting = waiting
        self.step = step

    def running(self, requests: Iterable[Request]) -> list[View]:
        owned = self.cache.blocks.owned
        return [self._view(r, r.computed, len(r.blocks), own_blocks=owned(r.blocks)) for r in requests]

    def window(self, frontier: Frontier, free_seats: int) -> list[View]:
        """The first of each line: as many as could be admitted, a few to pass them, and some of those who are blocked.

        So a long queue costs a step no more than a short one.
        """
        views: list[View] = []
        for pool in POOLS:
            most = WINDOW + free_seats
            for request in islice(self.waiting.line(pool), 4 * most):
                view = self._waiting(request, frontier)
                views.append(view)
                most -= not view.blocked
                if not most:
                    break
        return views

    def frontier(self, prompts: Iterable[Request]) -> Frontier:
        """Blocks that these running prompts are about to fill."""
        keys: Frontier = {}
        for request in prompts:
            self._claim(keys, request, request.computed // self.cache.block_size)
        return keys

    def rivals(self, admitted: Iterable[Request], frontier: Frontier) -> set[str]:
        """Who of the admitted would compute the same block as another one: all but the first of each."""
        keys, rivals = dict(frontier), set()
        for request in admitted:
            hit = self.cache.hit_blocks(request)
            if not unscored(request) and self._is_claimed(keys, request, hit):
                rivals.add(request.id)
            else:
                self._claim(keys, request, hit)
        return rivals

    def _claim(self, keys: Frontier, request: Request, blocks: int) -> None:
        key = self.cache.next_key(request, blocks)
        if key is not None:
            keys[key] = min(_turn(request), keys.get(key, _turn(request)))

    def _is_claimed(self, keys: Frontier, request: Request, blocks: int) -> bool:
        """By somebody who goes first anyway: nobody waits for who stands behind it."""
        key = self.cache.next_key(request, blocks)
        return key is not None and key in keys and keys[key] < _turn(request)

    def _waiting(self, request: Request, frontier: Frontier) -> View:
        hit = self.cache.hit_blocks(request)
        free_hits = self.cache.unheld(request, hit)
        blocked = not unscored(request) and self._is_claimed(frontier, request, hit)
        return self._view(request, hit * self.cache.block_size, hit, free_hits=free_hits, blocked=blocked)

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
            self.step - request.since,
            request.preemptions,
            request.limit,
            request.skips,
            free_hits,
            blocked,
            self.waiting.followers(request),
            (request.scored, request.prompt_len - 1) if unscored(request) else (0, 0),
        )


def _turn(request: Request) -> Turn:
    return RANK[request.pool], place(request)
