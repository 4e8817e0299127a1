"""The step in which nothing is to be decided: nobody waits, everybody decodes, so everybody gets a token.

Most steps are of this kind, and whoever waits for a token waits for the plan too. Pure. It must not know the rules of
schedule.py, which come to the same plan by a longer way.
"""

from __future__ import annotations

from collections.abc import Sequence

from minserve.policy.limits import Limits
from minserve.policy.order import order
from minserve.request import Chunk, View


def steady(running: Sequence[View], free_blocks: int, limits: Limits) -> tuple[Chunk, ...] | None:
    """A token for everybody, in order. None if somebody may have to rest, reads a prompt, drafts, or lacks a block."""
    if limits.paused or any(view.pool is not running[0].pool for view in running):
        return None
    size, missing = limits.block_size, 0
    for view in running:
        decodes = view.known - view.computed == 1 and view.known < view.limit and view.scored[1] <= view.computed
        if not decodes or view.forks or view.draft:
            return None
        missing += view.known > view.blocks * size
    if missing > free_blocks:
        return None
    return tuple(Chunk(view.id, view.computed, 1, 1) for view in sorted(running, key=order))
