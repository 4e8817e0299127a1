"""Which pools' decodes stay out of a step, so that a higher pool's tokens come soon.

Pure: counts from Views. It must not know what a step holds. Whose decodes wait keeps its seats and blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from minserve.policy.order import POOLS, Lines
from minserve.request import Pool, View

MAX_RESTS = 2  # not made up for: so two prompts in a row are let through, yet half of the steps remain


def resting(decoding: Lines, wanting: Lines) -> set[Pool]:
    """Pools whose decodes rest if a higher one reads a prompt: one may do so, and they can wait.

    wanting: who could read its prompt in this step.
    """
    return {pool for pool in below(wanting) if decoding[pool] and _rests(decoding[pool]) < MAX_RESTS}


def reading(decoding: Lines, step: int) -> set[Pool]:
    """Pools that read prompts in this step, if they have any, and decode in the next, because a higher one decodes:
    two short steps between its tokens instead of a long one."""
    return {p for p in below(decoding) if step % 2 and decoding[p] and _rests(decoding[p]) < MAX_RESTS}


def below(views: Lines) -> set[Pool]:
    """Pools with a higher one that has any of these."""
    first = next((rank for rank, pool in enumerate(POOLS) if views[pool]), len(POOLS))
    return set(POOLS[first + 1 :])


def _rests(decodes: Sequence[View]) -> int:
    """How often they rested without a step that made up for it; their skips count both."""
    return max((view.skips for view in decodes), default=0)
