"""How long a call that comes now would wait before it starts: what Retry-After says, and what degradation goes by.

Pure: fed with step times, tokens and ends. It must not know clocks, nor how long a queue may be.

A step costs a base and something for each prompt token in it (`StepCost`), so the wait is a number of steps and a
number of prompt tokens. Seats are counters of a bank: who waits takes the first that becomes free (list scheduling).
How long a seat is taken is known from max_tokens where answers end by length. Where they end by themselves, every
token has the same chance of being the last; that chance is measured over all tokens, those of running requests too, so
that a start with long answers under way does not look as if answers were short.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from minserve.policy.limits import Limits
from minserve.policy.order import RANK
from minserve.policy.step_cost import StepCost
from minserve.request import FinishReason, Pool, Request, Usage

_WINDOW = 20_000  # tokens after which what was counted so far weighs half


class Forecast:
    def __init__(self, quantum: int) -> None:
        """quantum: as StepCost's."""
        self._cost = StepCost(quantum)
        self._generated = self._ended = 0.0  # tokens; those after which an answer ended though more were allowed
        self._prompts = self._computed = 0.0  # prompt tokens of ended requests; those not found in the prefix index

    def step(self, decode_tokens: int, prefill_tokens: int, seconds: float) -> None:
        """Learn from a finished step; seconds of wall time, idle time not included."""
        self._cost.observe(decode_tokens, prefill_tokens, seconds)
        self._generated += decode_tokens
        if self._generated > _WINDOW:
            self._generated /= 2
            self._ended /= 2

    def end(self, finish: FinishReason, usage: Usage) -> None:
        """Learn from a request that has ended after it had generated something."""
        self._ended += finish is not FinishReason.LENGTH
        self._prompts += usage.prompt
        self._computed += usage.prompt - usage.cached
        if self._prompts > _WINDOW:
            self._prompts /= 2
            self._computed /= 2

    def wait(self, pool: Pool, requests: Iterable[Request], limits: Limits) -> float:
        """Seconds until a call of `pool` that comes now would start; 0 while nothing has been measured.

        requests: all that are live, in order of arrival. What the other pool holds now, up to its promise if it is the
        lower one, it is expected to go on holding.
        """
        live: Counter[Pool] = Counter()
        waiting: list[float] = []  # how long each takes a seat, in tokens
        running: list[int] = []  # the most tokens that each may still generate
        known = prompts = lengths = 0.0
        length = self._length()
        for request in requests:
            live[request.pool] += 1
            if request.pool is pool:
                most = request.limit - request.known
                if request.seat < 0:
                    waiting.append(length(most))
                else:
                    running.append(most)
                known += request.prompt_len
                lengths += length(request.params.max_tokens)
                prompts += _uncomputed(request)
        mean = (self._fresh * known + lengths / 2) / max(1, live[pool])
        seats = self._seats(pool, live, limits, int(limits.capacity / max(1.0, mean)))
        steps = _list_schedule(seats, self._ends(running), waiting)
        if steps == 0.0:
            return 0.0  # a seat is free
        prompts *= self._fresh
        steps = max(steps, prompts / limits.chunk_tokens)
        return steps * self._cost.base + prompts * self._cost.per_token

    # -- tokens

    @property
    def _chance(self) -> float:
        """That a token is the last one though more were allowed."""
        return min(1.0, self._ended / self._generated) if self._generated else 0.0

    @property
    def _fresh(self) -> float:
        """The share of prompt tokens that have to be computed."""
        return self._computed / self._prompts if self._prompts else 1.0

    def _length(self) -> Callable[[int], float]:
        """The mean length of an answer of at most so many tokens: of a geometric distribution that is cut there."""
        chance = self._chance
        if chance == 0.0:
            return float
        return lambda most: (1 - (1 - chance) ** most) / chance

    def _ends(self, most: Sequence[int]) -> list[float]:
        """When running requests end, in tokens from now; they may generate `most`.

        The first of k answers to end does so after a k-th of their mean length, the next after a (k-1)-th more ...:
        the mean of each alone would have the first seat become free far too late.
        """
        mean = 1 / self._chance if self._chance else math.inf
        ends, at = [], 0.0
        for place, limit in enumerate(sorted(most)):
            at += mean / (len(most) - place)
            ends.append(min(float(limit), at))
        return ends

    # -- seats

    def _seats(self, pool: Pool, live: Mapping[Pool, int], limits: Limits, fit: int) -> int:
        """How many of a pool's requests run at once: what seats, promises and blocks (`fit`) allow."""
        left = limits.max_seqs
        for other in Pool:
            if RANK[other] > RANK[pool]:
                left -= min(live[other], limits.promised_seats(other))
            elif other is not pool:
                left -= min(live[other], limits.max_seqs - limits.promised_seats(pool))
        return max(1, min(left, limits.pools[pool].max_seqs, fit))


def _list_schedule(seats: int, busy: Sequence[float], waiting: Iterable[float]) -> float:
    """When the first seat is free after all who wait, in order, took theirs for so long."""
    free = [0.0] * max(0, seats - len(busy)) + list(busy)
    heapq.heapify(free)
    for length in waiting:
        heapq.heapreplace(free, free[0] + length)
    return free[0]


def _uncomputed(request: Request) -> int:
    """Known tokens that still have to be computed; those of a sibling are its leader's."""
    if request.choice and not request.output_len:
        return 0
    return max(0, request.known - request.computed - 1)
