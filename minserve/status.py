"""What people and scrapers see of an engine that serves: its state, counts, and the requests in it.

Owns nothing: snapshots, which keep no hold on what they show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from minserve.request import Pool, Request

Phase = Literal["queued", "prefill", "decode", "preempted"]


class State(StrEnum):
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Counts of requests and blocks. step_age: seconds since the last step, None before the first."""

    state: State
    steps: int
    running: Mapping[Pool, int]
    waiting: Mapping[Pool, int]
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    streams: int
    step_age: float | None


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """One request as the live view shows it: counts of tokens, ids of the blocks it holds."""

    id: str
    pool: Pool
    phase: Phase
    prompt: int
    computed: int
    output: int
    blocks: tuple[int, ...]

    @classmethod
    def of(cls, request: Request) -> LiveRequest:
        return cls(
            id=request.id,
            pool=request.pool,
            phase=phase_of(request),
            prompt=request.prompt_len,
            computed=request.computed,
            output=request.output_len,
            blocks=tuple(request.blocks),
        )


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How far a submission has come: prompt tokens computed, of how many; how many requests of its pool wait ahead."""

    phase: Phase | Literal["done"]
    computed: int
    prompt: int
    ahead: int


def phase_of(request: Request) -> Phase:
    """queued: it has not started. preempted: it has, and waits to go on."""
    if request.seat < 0:
        return "preempted" if request.preemptions else "queued"
    return "decode" if request.output_len else "prefill"
