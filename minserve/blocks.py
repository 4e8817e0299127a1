"""The KV cache's blocks: who holds which, which are free, and which still hold something worth finding again.

Owns the free list, the reference counts and the prefix index (key -> block). It must not know requests, tokens or
arrays: keys are opaque bytes (`prefix.py` makes them), blocks are integers.

A block is *held* (references > 0), *cached* (nobody holds it but the index knows what it has) or *free*. Cached blocks
count as available: they are evicted when free ones run out, least recently used first. Whoever holds a block of a chain
holds its ancestors too, and gives its blocks back last one first; so a leaf is always older than its parent, and
eviction never leaves a block in the index whose parent is gone.

A block given back may be handed out by the next plan at the earliest, and that comes after the step that could still
be writing to it: so blocks are freed at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.references = [0] * num_blocks
        self._free = bytearray(b"\x01" * num_blocks)  # one byte a block: finding runs is a byte search
        self._num_free = num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._index: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}  # block -> its key in the index

    @property
    def total(self) -> int:
        return len(self.references)

    @property
    def free(self) -> int:
        """Blocks that nobody holds and the index doesn't know."""
        return self._num_free

    @property
    def cached(self) -> int:
        """Blocks that nobody holds but the index knows."""
        return len(self._cached)

    @property
    def available(self) -> int:
        return self._num_free + len(self._cached)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` blocks with one reference each: those that follow block `after` if free, else a run of consecutive
        ones, else any, evicting cached ones at last. MemoryError if fewer are available; nothing is taken then."""
        if count > self.available:
            raise MemoryError(f"{count} blocks wanted, {self.available} available")
        taken = self._take_run(count, after)
        while len(taken) < count:
            taken += self._take_run(1) or [self._evict()]
        for block in taken:
            self.references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference for each, cached ones included."""
        for block in blocks:
            if self.references[block] == 0:
                del self._cached[block]
            self.references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less for each block of a chain, given in its order."""
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                if block in self._keys:
                    self._cached[block] = None
                else:
                    self._free[block] = 1
                    self._num_free += 1

    def is_held(self, block: int) -> bool:
        return self.references[block] > 0

    def owned(self, blocks: Iterable[int]) -> int:
        """How many of these would become available if their holder let go."""
        return list(map(self.references.__getitem__, blocks)).count(1)

    # -- the prefix index

    def knows(self, key: bytes) -> bool:
        return key in self._index

    def find(self, key: bytes) -> int:
        """The block that has what the key stands for; KeyError if none has."""
        return self._index[key]

    def register(self, key: bytes, block: int) -> int:
        """Make a held block findable. Returns the block that has the key: the first registration wins."""
        known = self._index.setdefault(key, block)
        if known == block:
            self._keys[block] = key
        return known

    def _take_run(self, count: int, after: int | None = None) -> list[int]:
        """Consecutive free blocks, the ones behind `after` if possible; none if there is no such run."""
        pattern = b"\x01" * count
        follows = after is not None and self._free.startswith(pattern, after + 1)
        start = after + 1 if after is not None and follows else self._free.find(pattern)
        if start < 0:
            return []
        self._free[start : start + count] = bytes(count)
        self._num_free -= count
        return list(range(start, start + count))

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._index[self._keys.pop(block)]
        return block

    def check(self) -> None:
        """The invariant; AssertionError says what is wrong. Every block is in exactly one of the three states."""
        free = {block for block, flag in enumerate(self._free) if flag}
        held = {block for block, references in enumerate(self.references) if references > 0}
        cached = set(self._cached)
        assert min(self.references, default=0) >= 0, "negative reference count"
        assert len(free) == self._num_free, f"{len(free)} blocks are free, {self._num_free} counted"
        assert not free & held, f"free and held: {free & held}"
        assert not cached & held, f"cached and held: {cached & held}"
        assert not free & cached, f"free and cached: {free & cached}"
        assert len(free) + len(held) + len(cached) == self.total, "a block is lost"
        assert {key: block for block, key in self._keys.items()} == self._index, "index and keys differ"
        assert cached <= set(self._keys), "a cached block has no key"
        assert not free & set(self._keys), "a free block is in the index"
