"""The books of a step that is being planned: its tokens, and who may take them.

Owns the arithmetic of rules 2 and 5 of schedule.py. Pure: counts from Views. It must not know seats and blocks, nor in
which order requests ask.
"""

from __future__ import annotations

from minserve.policy import turns
from minserve.policy.limits import Limits
from minserve.policy.order import POOLS, RANK, Lines
from minserve.request import Pool


class Budget:
    """decodes: tokens left for decodes. read: prompt tokens taken. kept: those that higher pools left to lower ones.

    resting, reading: pools whose decodes stay out of this step (see turns.py) unless they are woken.
    """

    def __init__(self, decoding: Lines, wanting: Lines, step: int, limits: Limits) -> None:
        """wanting: who could read its prompt in this step."""
        self._decoding, self._wanting, self._step, self._limits = decoding, wanting, step, limits
        self._below = turns.below(decoding)
        self.resting = turns.resting(decoding, wanting)
        self.reading = turns.reading(decoding, step)
        decodes = sum(len(views) for views in decoding.values())
        rested = sum(len(decoding[pool]) for pool in self.resting | self.reading)
        self.decodes = min(decodes - rested, limits.max_step_tokens)
        self._left = limits.max_step_tokens - self.decodes
        if decodes:
            self._left = min(self._left, limits.chunk_tokens + int(rested * limits.decode_worth))
        self._whole = self._left
        self._caps = {pool: self._cap(pool) for pool in POOLS}
        self.read = 0
        self.kept = 0

    @property
    def spent(self) -> bool:
        return self._left <= 0

    def left(self, pool: Pool) -> int:
        """Prompt tokens that the pool may still take."""
        return min(self._left, self._caps[pool])

    def take(self, pool: Pool, tokens: int) -> None:
        self.read += tokens
        self._left -= tokens
        self._caps[pool] -= tokens

    def wake(self, pool: Pool, taken: int) -> None:
        """Its decodes don't rest after all: their tokens, and what their time is worth in prompt tokens.

        taken: tokens that the step has by now.
        """
        decodes = len(self._decoding[pool])
        self.decodes += decodes
        self._left = self._limits.max_step_tokens - taken - decodes
        if any(self._decoding.values()):
            self._left = min(self._left, self._limits.chunk_tokens)
        self._caps[pool] = self._cap(pool)

    def keep_for_lower(self, pool: Pool) -> int:
        """Set aside what lower pools were promised and want; returns how much, to be given back."""
        promised = 0
        for below in POOLS:
            if RANK[below] > RANK[pool]:
                wanted = sum(view.known - view.computed for view in self._wanting[below])
                promised += min(wanted, self._limits.promised_tokens(below, self._whole, self._step))
        kept = min(promised, self._left)
        self.kept += kept
        self._left -= kept
        return kept

    def give_back(self, kept: int) -> None:
        self._left += kept

    def cap_at_kept(self, pool: Pool) -> None:
        """In a step that reads a higher pool's prompt, a lower one gets what was kept for it."""
        self._caps[pool] = self.kept

    def _cap(self, pool: Pool) -> int:
        """Of all prompt tokens: while a higher pool decodes, half, or none in a step in which the pool decodes."""
        if pool not in self._below:
            return self._limits.max_step_tokens
        reads = pool in self.reading or not self._decoding[pool]
        return max(self._limits.block_size, self._left // 2) if reads else 0
