"""Stop strings in a text that arrives in pieces.

Owns the text that might become a stop string. It must not know tokens.

Matching is Aho-Corasick (1975): one automaton over all stop strings, one transition per character, so the cost is
that of the new text alone, and the state's depth is exactly how much must be held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopChecker:
    """Feed it `push(text)`; what it returns is safe to send. After a match it must not be fed again.

    The match that completes first ends the text; of several completing at one character the first in the list wins.
    include: the stop string stays in the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._include = include
        self._build()
        self._state = 0
        self._held = ""

    def push(self, text: str, *, allowed: bool = True) -> tuple[str, str | None]:
        """(text that can't become part of a stop string, the stop string that matched or None).

        allowed False: matches that complete in this text don't count (min_tokens); later ones do.
        """
        pending = self._held + text
        for i, character in enumerate(text, start=len(self._held) + 1):
            self._state = self._step(self._state, character)
            match = self._matches[self._state]
            if match >= 0 and allowed:
                stop = self._stops[match]
                self._held = ""
                return pending[: i if self._include else i - len(stop)], stop
        # A whole stop string that didn't count begins nothing longer: wait for what its end might begin.
        while not self._edges[self._state] and self._state:
            self._state = self._failures[self._state]
        safe = len(pending) - self._depths[self._state]
        self._held = pending[safe:]
        return pending[:safe], None

    def flush(self) -> str:
        """The held text, once nothing can follow it."""
        held, self._held, self._state = self._held, "", 0
        return held

    # -- the automaton: state 0 is the root; a state stands for a prefix of some stop string

    def _build(self) -> None:
        self._edges: list[dict[str, int]] = [{}]
        self._depths = [0]
        self._matches = [-1]  # index of the stop string that is complete in this state
        for index, stop in enumerate(self._stops):
            state = 0
            for character in stop:
                if character not in self._edges[state]:
                    self._edges[state][character] = len(self._edges)
                    self._edges.append({})
                    self._depths.append(self._depths[state] + 1)
                    self._matches.append(-1)
                state = self._edges[state][character]
            if self._matches[state] < 0:
                self._matches[state] = index
        self._link()

    def _link(self) -> None:
        """Failure links, breadth first: the longest proper suffix of a state that is a state too."""
        self._failures = [0] * len(self._edges)
        queue = deque(self._edges[0].values())
        while queue:
            state = queue.popleft()
            for character, target in self._edges[state].items():
                self._failures[target] = self._step(self._failures[state], character)
                queue.append(target)
            endings = [m for m in (self._matches[state], self._matches[self._failures[state]]) if m >= 0]
            self._matches[state] = min(endings, default=-1)

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._edges[state]:
            state = self._failures[state]
        return self._edges[state].get(character, 0)
