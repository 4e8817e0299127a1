"""Short ways to write what a policy sees and what it decided."""

from __future__ import annotations

from typing import Any

from minserve.policy.limits import Limits, PoolLimits
from minserve.policy.schedule import plan_step
from minserve.request import Pool, StepPlan, View

BLOCK = 4
INTERACTIVE, BULK = Pool.INTERACTIVE, Pool.BULK


def make_limits(**fields: Any) -> Limits:
    """Roomy: a test tightens what it is about. Interactive is promised 80 % of tokens and seats and 70 % of blocks."""
    seats = fields.get("max_seqs", 10)
    defaults: dict[str, Any] = {
        "block_size": BLOCK,
        "num_blocks": 1000,
        "max_seqs": seats,
        "max_step_tokens": 64,
        "chunk_tokens": min(32, fields.get("max_step_tokens", 64)),
        "max_rows": 64,
        "watermark_blocks": 0,
        "pools": {INTERACTIVE: PoolLimits(seats, 0.8, 0.7), BULK: PoolLimits(seats, 0.2, 0.3)},
    }
    return Limits(**(defaults | fields))


def pools(**fields: Any) -> dict[Pool, PoolLimits]:
    """Limits of both pools; fields are tuples (interactive, bulk)."""
    values = {"max_seqs": (100, 100), "token_share": (0.8, 0.2), "kv_share": (0.7, 0.3)} | fields
    return {pool: PoolLimits(**{name: pair[i] for name, pair in values.items()}) for i, pool in enumerate(Pool)}


def view(name: str, known: int, computed: int = 0, **fields: Any) -> View:
    """A request that waits, unless it has computed something. It holds the blocks of its rows, alone."""
    blocks = fields.pop("blocks", -(-computed // BLOCK))
    defaults: dict[str, Any] = {
        "pool": INTERACTIVE,
        "priority": 0,
        "arrival": 0.0,
        "age": 0,
        "preemptions": 0,
        "limit": known + 100,
        "own_blocks": blocks,
    }
    return View(id=name, known=known, computed=computed, blocks=blocks, **(defaults | fields))


def decode(name: str, known: int, **fields: Any) -> View:
    """A running request that wants its next token."""
    return view(name, known, known - 1, **fields)


def plan(running: list[View], waiting: list[View], free: int = 1000, step: int = 0, **fields: Any) -> StepPlan:
    given = fields.pop("limits", None)
    return plan_step(step, running, waiting, free, given or make_limits(**fields))


def counts(planned: StepPlan) -> dict[str, int]:
    """Tokens per request, in the order of the plan."""
    return {chunk.request_id: chunk.count for chunk in planned.chunks}
