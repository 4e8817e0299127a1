"""Who goes before whom: the order of pools, the order in a pool, and where a request's patience ends.

Pure: a View, nothing else. It must not know what there is to be had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minserve.request import Pool, View

AGE_STEPS = 64  # steps of waiting that outweigh one level of priority
MAX_SKIPS = 8  # steps in which later requests of its pool may overtake a request that doesn't fit
MAX_SKIPS_BELOW = 256  # steps in which a higher pool may overtake a pool that has nothing running
MAX_PREEMPTIONS = 3  # after these a request comes back only with room for all it may ever need

POOLS = tuple(Pool)  # interactive before bulk
RANK = {pool: rank for rank, pool in enumerate(POOLS)}

Lines = Mapping[Pool, Sequence[View]]  # each pool's requests, in order


def order(view: View) -> tuple[int, float, str]:
    """Who goes first in a pool: lower priority, then arrival; age makes up for priority, so nothing starves.

    Everybody ages alike, so two requests never change places.
    """
    return view.priority * AGE_STEPS - view.age, view.arrival, view.id


def starving(view: View) -> bool:
    """Overtaken so often that promises to others no longer hold it back."""
    return view.skips >= (MAX_SKIPS if RANK[view.pool] == 0 else MAX_SKIPS_BELOW)
