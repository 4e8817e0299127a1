"""Several token streams read as one: a completions call may bring many prompts.

Owns a task per stream. Choices are renumbered prompt by prompt: index = prompt * n + k. It must not know timeouts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from minserve.request import TextDelta
from minserve.server.ports import Reader


class Merged:
    """A Reader over several. Its queue is as bounded as the streams' own: by the tokens asked for."""

    def __init__(self, readers: Sequence[Reader], n: int) -> None:
        self._queue: asyncio.Queue[list[TextDelta] | Exception] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._pump(reader, i * n)) for i, reader in enumerate(readers)]

    def __aiter__(self) -> Merged:
        return self

    async def __anext__(self) -> list[TextDelta]:
        deltas: list[TextDelta] = []
        item = await self._queue.get()
        while True:
            if isinstance(item, Exception):
                raise item
            deltas.extend(item)
            if self._queue.empty():
                return deltas
            item = self._queue.get_nowait()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _pump(self, reader: Reader, first: int) -> None:
        try:
            async for deltas in reader:
                self._queue.put_nowait([replace(delta, choice=first + delta.choice) for delta in deltas])
        except Exception as error:
            self._queue.put_nowait(error)
