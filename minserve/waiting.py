"""Requests that wait: a sorted line per pool, and the members of a group who wait for their leader.

Owns the lines and the groups. It must not know blocks or plans.

A group is what one submission asked for: n requests with the same prompt. One of them leads: it stands in line,
computes the prompt and scores it if asked to. The others wait beside the line until they are forked from the leader's
last prompt row. Once the leader is through, or gone, the next one who still waits leads.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from minserve.policy.order import AGE_STEPS
from minserve.request import Pool, Request, TokenLogprob

Place = tuple[int, float, str]


@dataclass(slots=True)
class Group:
    """leader: who computes the prompt; None once nobody waits for it. scores: log probabilities of the prompt's
    positions 1.., as far as they were computed."""

    members: int
    leader: Request | None
    siblings: list[Request] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)


class Waiting:
    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self.in_line: Counter[Pool] = Counter()
        self.beside: Counter[Pool] = Counter()  # waiting for their leader
        self._lines: dict[Pool, list[tuple[Place, Request]]] = {pool: [] for pool in Pool}

    @property
    def anybody(self) -> bool:
        return any(self.in_line.values()) or any(self.beside.values())

    def add_group(self, requests: Sequence[Request]) -> None:
        leader, *siblings = requests
        self.groups[leader.group] = Group(len(requests), leader, siblings)
        self.beside[leader.pool] += len(siblings)
        self.add(leader)

    def add(self, request: Request) -> None:
        """Into its place in line: the one it had before, if it was preempted."""
        insort(self._lines[request.pool], (place(request), request))
        self.in_line[request.pool] += 1

    def take(self, request: Request) -> None:
        """Out of the line, or from beside it."""
        siblings = self.groups[request.group].siblings
        if request in siblings:
            siblings.remove(request)
            self.beside[request.pool] -= 1
            return
        line = self._lines[request.pool]
        del line[bisect_left(line, (place(request),))]
        self.in_line[request.pool] -= 1

    def line(self, pool: Pool) -> Iterator[Request]:
        return (request for _, request in self._lines[pool])

    def followers(self, request: Request) -> tuple[str, ...]:
        """Ids of those who wait for this request."""
        group = self.groups[request.group]
        return tuple(r.id for r in group.siblings) if group.leader is request and group.siblings else ()

    def add_scores(self, request: Request, scores: Sequence[TokenLogprob]) -> None:
        """What the next rows of the group's prompt scored; whoever leads by now goes on behind them."""
        group = self.groups[request.group]
        group.scores += scores
        if group.leader is not None:
            group.leader.scored = len(group.scores)

    def stop_leading(self, request: Request) -> None:
        """The prompt is computed, or the leader is gone: the next sibling leads, and goes on with the scores."""
        group = self.groups[request.group]
        if group.leader is not request:
            return
        group.leader = None
        if group.siblings:
            heir = group.siblings.pop(0)
            self.beside[heir.pool] -= 1
            heir.scored = len(group.scores)
            group.leader = heir
            self.add(heir)

    def leave(self, request: Request) -> None:
        """The request ended and no longer waits."""
        self.stop_leading(request)
        group = self.groups[request.group]
        group.members -= 1
        if group.members == 0:
            del self.groups[request.group]

    def check(self, waiting: Iterable[Request]) -> None:
        """The invariant: each of these is in line or beside it, once, and nobody else is."""
        placed = [request.id for pool in Pool for request in self.line(pool)]
        for name, group in self.groups.items():
            placed += [sibling.id for sibling in group.siblings]
            assert group.leader is not None or not group.siblings, f"{name}: siblings wait for nobody"
        assert all(self.in_line[pool] == len(line) for pool, line in self._lines.items()), "lines miscounted"
        assert self.beside.total() == sum(len(group.siblings) for group in self.groups.values()), "siblings miscounted"
        assert sorted(placed) == sorted(request.id for request in waiting), f"in line or beside it: {placed}"
        for line in self._lines.values():
            assert line == sorted(line), "a line is out of order"


def place(request: Request) -> Place:
    """Where a request stands in its pool's line. Sorts as `policy.order.order` does: age grows alike for all, so
    nobody ever changes places."""
    return request.priority * AGE_STEPS + request.since, request.arrival, request.id
