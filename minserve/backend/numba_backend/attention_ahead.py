"""What attention has fetched before it is read, and how long before.

Where few rows share the keys, memory is what limits. A Zen 4 is left alone with a chunk whose blocks are adjacent: its
own prefetching does best undisturbed. Other streams are too short for it: values are fetched while their keys are read,
and the next task's keys while values are. An Intel's own prefetching is late everywhere, so whatever is read is fetched
AHEAD blocks before, in the order of reading.

Owns that order. It must not know what is computed with what is fetched.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from minserve.backend.numba_backend.jit import inlined, is_zen
from minserve.backend.numba_backend.simd_memory import i32

ZEN = is_zen()
AHEAD = 6


@inlined
def distance(adjacent, n, next_n):
    """How many blocks ahead are fetched. next_n: of what follows, 0 if nothing does."""
    if ZEN:
        return 0 if adjacent or next_n == 0 else n
    return AHEAD


@inlined
def block_at(k, n, cache, first, nbytes, follower):
    """Address of what is read after k blocks of a chunk of n: its keys, its values, keys and values of what follows."""
    (keys, values, table), (next_keys, next_table, next_n) = cache, follower
    if k < n:
        return keys + i32(table, first + k) * nbytes
    if k < 2 * n:
        return values + i32(table, first + k - n) * nbytes
    k -= 2 * n
    if k < next_n:
        return next_keys + i32(next_table, k) * nbytes
    return next_keys + values - keys + i32(next_table, max(0, min(k - next_n, next_n - 1))) * nbytes
