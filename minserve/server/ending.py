"""How a call has ended, in the accounting's terms: what it read and wrote, and what its client was told.

Owns the step from token streams to a settlement. When a call ends is the gateway's business.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from minserve.economics.reservation import Reservation
from minserve.economics.rows import REFUSED
from minserve.economics.settlement import Settlement, read_prompt
from minserve.request import FinishReason, RequestError
from minserve.server.arrival import Call
from minserve.server.generation import Generation
from minserve.server.ports import TokenStream

_BILL_S = 0.1  # so long an error waits for the step that runs, after which it can say what its call cost


class ClientStalled(ConnectionError):
    """The client is there, but took nothing for too long."""


@dataclass(slots=True)
class Ending:
    """How a call ended, as its row will say."""

    status: int = 200
    code: str = ""


def so_far(generation: Generation) -> Settlement:
    """What a call has used that still runs: the tokens its client may have had, and the prompt read for them."""
    call, tally = generation.call, generation.tally
    read = call.prompt_tokens
    if not generation.begun:
        read = min(read, sum(stream.progress.computed for stream in generation.streams))
    return Settlement(
        finish=FinishReason.ABORT.value,
        status=503,
        code="shutting_down",
        prompt_tokens=read,
        cached_tokens=min(read, tally.cached),
        completion_tokens=tally.completion,
    )


async def settle_later(
    call: Call, streams: list[TokenStream], computed: list[int], reservation: Reservation, ending: Ending
) -> None:
    """Settle when every stream has come to its end."""
    try:
        for stream in streams:
            async for _ in stream:
                pass
    finally:
        settle(call, streams, computed, reservation, ending)


def settle(
    call: Call, streams: list[TokenStream], computed: list[int], reservation: Reservation, ending: Ending
) -> None:
    """Settle a call whose streams have ended. computed: prompt tokens of each in the cache when its reader left."""
    outcomes = [outcome for stream in streams for outcome in stream.outcomes]
    if not outcomes:  # the engine took nothing of it
        reservation.settle(Settlement(finish=REFUSED, status=ending.status, code=ending.code))
        return
    read = sum(
        _prompt_read(len(prompt), stream, rows)
        for prompt, stream, rows in zip(call.prompts, streams, computed, strict=True)
    )
    reservation.settle(Settlement.of(outcomes, status=ending.status, code=ending.code, computed=read))


async def tell(failure: RequestError, reservation: Reservation, settling: asyncio.Task[None] | None) -> None:
    """Let an error say what was cut before it ended its call, and what that is charged."""
    if settling is not None:
        await asyncio.wait([settling], timeout=_BILL_S)
    failure.degraded = reservation.row.degraded
    failure.reserved = reservation.row.reserved
    failure.cost = reservation.cost if reservation.settled else None


def _prompt_read(prompt_tokens: int, stream: TokenStream, rows: int) -> int:
    """Prompt tokens that were processed: all of them, or what had been computed when the reader left."""
    if any(map(read_prompt, stream.outcomes)):
        return prompt_tokens
    cached = min((outcome.usage.cached for outcome in stream.outcomes), default=0)
    return max(0, rows - cached)
