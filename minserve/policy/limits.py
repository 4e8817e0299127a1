"""What a step may use, and what each pool is promised of it.

Pure numbers: no requests, no state. The scheduling policy reads them, the engine may replace them between steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from minserve.request import Pool


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """One pool's part. max_seqs: the most seats it may hold, ever.

    Shares (0..1) are promises under contention, lent to the other pool while nobody of this one wants them:
    token_share of the prompt tokens of a step and of the seats, kv_share of the KV blocks.
    """

    max_seqs: int
    token_share: float
    kv_share: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may use. ValueError, naming the field, if they contradict each other.

    chunk_tokens: prompt tokens of a step while somebody decodes. max_rows: logit rows of a step. watermark_blocks: an
    admission leaves this many free, for those who decode. Seats never exceed tokens or rows: so there is a token and a
    row for everybody who decodes, in every step.
    decode_worth: prompt tokens that take as long as one decode: what a step has room for when a decode rests.
    paused: pools that get nothing now and are promised nothing; what they hold is lent to the others.
    """

    block_size: int
    num_blocks: int
    max_seqs: int
    max_step_tokens: int
    chunk_tokens: int
    max_rows: int
    watermark_blocks: int
    pools: Mapping[Pool, PoolLimits]
    decode_worth: float = 1.0
    paused: frozenset[Pool] = frozenset()

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_seqs", "chunk_tokens", "decode_worth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("max_step_tokens", "max_rows"):
            if getattr(self, name) < self.max_seqs:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least max_seqs, {self.max_seqs}")
        if self.chunk_tokens > self.max_step_tokens:
            raise ValueError(f"chunk_tokens is {self.chunk_tokens}; max_step_tokens is only {self.max_step_tokens}")
        if self.watermark_blocks < 0:
            raise ValueError(f"watermark_blocks is {self.watermark_blocks}; it must not be negative")
        if missing := set(Pool) - set(self.pools):
            raise ValueError(f"pools lacks {', '.join(sorted(missing))}")
        for pool, limits in self.pools.items():
            if limits.max_seqs < 1:
                raise ValueError(f"max_seqs of pool {pool} is {limits.max_seqs}; it must be at least 1")

    @property
    def capacity(self) -> int:
        """Tokens that all blocks together hold."""
        return self.num_blocks * self.block_size

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def promised_seats(self, pool: Pool) -> int:
        """At least one for a pool with any share, as long as there is one for everybody."""
        share = self._token_share(pool)
        seats = int(share * self.max_seqs)
        if share > 0 and self.max_seqs >= len(self.pools):
            seats = max(1, seats)
        return min(seats, self.pools[pool].max_seqs)

    def promised_blocks(self, pool: Pool) -> int:
        if pool in self.paused:
            return 0
        total = sum(p.kv_share for p in self.pools.values())
        return int(self.pools[pool].kv_share / max(1.0, total) * self.num_blocks)

    def promised_tokens(self, pool: Pool, budget: int, step: int) -> int:
        """The pool's part of `budget` prompt tokens in this step: whole numbers that add up to the share over steps."""
        part = self._token_share(pool) * budget
        return int((step + 1) * part) - int(step * part)

    def _token_share(self, pool: Pool) -> float:
        if pool in self.paused:
            return 0.0
        total = sum(p.token_share for p in self.pools.values())
        return self.pools[pool].token_share / max(1.0, total)
