"""Finding computed blocks again: the keys of a request's blocks, and how far the index knows them.

Owns one Chain per request. It must not know queues or plans.

The key of a block stands for everything its rows depend on: the weights, the salt (whose cache it is) and all tokens up
to its end. It is chained: SHA-256 of the parent's key and the block's tokens, each part tagged and length-delimited, so
that no two different pasts can spell the same bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from minserve.blocks import BlockPool


def root_key(weights_id: bytes, salt: bytes) -> bytes:
    """The parent of every first block: the salt counts from the first token on."""
    return _digest(b"weights", weights_id, b"salt", salt)


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    return _digest(b"parent", parent, b"tokens", struct.pack(f"<{len(tokens)}I", *tokens))


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


class Chain:
    """The blocks of one token list, which may only grow. Each key is computed once, when it is first asked for.

    registered: how many leading blocks of the request are the index's own.
    """

    __slots__ = ("_keys", "_known", "_root", "_size", "_tokens", "registered")

    def __init__(self, root: bytes, tokens: list[int], block_size: int) -> None:
        self._root = root
        self._tokens = tokens
        self._size = block_size
        self._keys: list[bytes] = []
        self._known = 0
        self.registered = 0

    def key(self, index: int) -> bytes:
        """Of the index-th full block."""
        while len(self._keys) <= index:
            place = len(self._keys)
            parent = self._keys[-1] if place else self._root
            self._keys.append(block_key(parent, self._tokens[place * self._size : (place + 1) * self._size]))
        return self._keys[index]

    def next_key(self, blocks: int) -> bytes | None:
        """The key of the block after the first `blocks`, if the known tokens fill it."""
        return self.key(blocks) if (blocks + 1) * self._size <= len(self._tokens) else None

    def probe(self, pool: BlockPool) -> int:
        """How many leading blocks the index has now. Never all tokens: the last one must be computed for its logits.

        Starts from the last answer, since a block in the index has its ancestors there too.
        """
        most = (len(self._tokens) - 1) // self._size
        known = min(self._known, most)
        while known and not pool.knows(self.key(known - 1)):
            known -= 1
        while known < most and pool.knows(self.key(known)):
            known += 1
        self._known = known
        return known

    def block(self, pool: BlockPool, index: int) -> int:
        """The index-th full block as the index has it; it must be there."""
        return pool.find(self.key(index))
