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
from collections.abc import Iterable, Sequence

from minserve.policy.limits import Limits
from minserve.policy.pace import StepCost
from minserve.policy.room import RANK
from minserve.request import FinishReason, Pool, Request, Usage

_WINDOW = 20_000  # tokens after which what was counted so far weighs half


class Forecast:
    def __init__(self, quantum: int) -> None:
        """quantum: a step with fewer prompt tokens says nothing of what one costs."""
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
        requests = list(requests)
        mine = [request for request in requests if request.pool is pool]
        waiting = [request for request in mine if request.seat < 0]
        running = [request for request in mine if request.seat >= 0]
        seats = self._seats(pool, requests, mine, limits)
        busy = self._remaining([r.limit - r.known for r in running])
        counters = [0.0] * max(0, seats - len(busy)) + busy
        heapq.heapify(counters)
        for request in waiting:
            heapq.heapreplace(counters, counters[0] + self._length(request.limit - request.known))
        steps = counters[0]
        if steps == 0.0:
            return 0.0  # a seat is free
        prompts = self._fresh * sum(_prompt(request) for request in mine)
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

    def _length(self, most: int) -> float:
        """The mean length of an answer of at most `most` tokens: of a geometric distribution that is cut there."""
        chance = self._chance
        return (1 - (1 - chance) ** most) / chance if chance else float(most)

    def _remaining(self, most: Sequence[int]) -> list[float]:
        """Tokens that running requests still generate; they may generate `most`.

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

    def _seats(self, pool: Pool, requests: Sequence[Request], mine: Sequence[Request], limits: Limits) -> int:
        """How many of a pool's requests run at once: what seats, promises and blocks allow."""
        live = Counter(request.pool for request in requests)
        left = limits.max_seqs
        for other in Pool:
            if RANK[other] > RANK[pool]:
                left -= min(live[other], limits.promised_seats(other))
            elif other is not pool:
                left -= min(live[other], limits.max_seqs - limits.promised_seats(pool))
        seats = min(left, limits.pools[pool].max_seqs)
        if mine:
            held = sum(self._fresh * r.prompt_len + self._length(r.params.max_tokens) / 2 for r in mine) / len(mine)
            seats = min(seats, int(limits.capacity / max(1.0, held)))
        return max(1, seats)


def _prompt(request: Request) -> int:
    """Known tokens that still have to be computed; those of a sibling are its leader's."""
    return max(0, request.known - request.computed - 1) if request.choice == 0 or request.output_len else 0
