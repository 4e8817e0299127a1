"""Which pools' decodes stay out of a step, so that a higher pool's tokens come soon.

Pure: counts from Views. It must not know what a step holds. Whose decodes wait keeps its seats and blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minserve.policy.room import POOLS, RANK
from minserve.request import Pool, View

MAX_RESTS = 2  # not made up for: so two prompts in a row are let through, yet half of the steps remain

_Views = Mapping[Pool, Sequence[View]]


def resting(decoding: _Views, wanting: _Views) -> set[Pool]:
    """Pools whose decodes rest if a higher one reads a prompt: one may do so, and they can wait.

    wanting: who could read its prompt in this step.
    """
    return {
        pool
        for pool in POOLS
        if any(wanting[above] for above in POOLS[: RANK[pool]]) and _rests(decoding[pool]) < MAX_RESTS
    }


def reading(decoding: _Views, step: int) -> set[Pool]:
    """Pools that read prompts in this step, if they have any, and decode in the next, because a higher one decodes:
    two short steps between its tokens instead of a long one."""
    return {pool for pool in below(decoding) if step % 2 and _rests(decoding[pool]) < MAX_RESTS}


def below(decoding: _Views) -> set[Pool]:
    """Pools with a higher one that decodes."""
    return {pool for pool in POOLS if any(decoding[above] for above in POOLS[: RANK[pool]])}


def _rests(decodes: Sequence[View]) -> int:
    """How often they rested without a step that made up for it; their skips count both."""
    return max((view.skips for view in decodes), default=0)
