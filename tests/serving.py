"""A tiny engine behind its step loop, and what is left when it stops."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from minserve.async_engine import AsyncEngine
from minserve.request import Pool, TextDelta
from minserve.stream import Stream
from tests.engines import Delayed, tiny


@asynccontextmanager
async def running(
    seconds: float = 0.0, fail: set[int] | None = None, step_timeout: float = 10.0, max_queue: int = 64, **options: Any
) -> AsyncIterator[AsyncEngine]:
    engine = tiny(**options).engine
    engine.runner = Delayed(engine.runner, seconds, fail)  # type: ignore[assignment]
    serving = AsyncEngine(engine, max_queue=dict.fromkeys(Pool, max_queue), step_timeout=step_timeout)
    await serving.start()
    try:
        yield serving
    finally:
        await serving.stop()
        idle(serving)


def idle(serving: AsyncEngine) -> None:
    """Nothing is held: every block free, no request, no stream."""
    serving.engine.scheduler.check()
    status = serving.status()
    assert status.blocks_free + status.blocks_cached == status.blocks_total
    assert status.streams == 0
    assert not any(status.running.values())
    assert not any(status.waiting.values())


async def read(stream: Stream) -> list[TextDelta]:
    return [delta async for deltas in stream for delta in deltas]
