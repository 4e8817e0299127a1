"""What the reader of one submission holds: deltas as they come, and the way to say that nobody reads any more.

Owns the deltas that were not read yet, and nothing of the engine. Touched on the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from minserve.engine import Delivery
from minserve.request import RequestOutcome, Submission, TextDelta
from minserve.status import PromptProgress


class Stream(AsyncIterator[list[TextDelta]]):
    """At most n * max_tokens deltas; nothing is dropped, nobody is awaited."""

    def __init__(
        self, submission: Submission, abort: Callable[[str], object], progress: Callable[[str], PromptProgress]
    ) -> None:
        self.submission = submission
        self.outcomes: list[RequestOutcome] = []
        self._abort = abort
        self._progress = progress
        self._pending: list[TextDelta] = []
        self._open = submission.n  # choices that have not ended
        self._waiter: asyncio.Future[None] | None = None

    async def __anext__(self) -> list[TextDelta]:
        """Everything that is new, at least one delta; ends after the last choice has finished."""
        while not self._pending:
            if self.done:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pending, self._pending = self._pending, []
        return pending

    def close(self) -> None:
        """The reader is gone: abort what is unfinished. Idempotent, legal in every state."""
        if not self.done:
            self._abort(self.submission.id)

    @property
    def progress(self) -> PromptProgress:
        return self._progress(self.submission.id)

    @property
    def done(self) -> bool:
        return self._open == 0

    def deliver(self, delivery: Delivery) -> None:
        self._pending.append(delivery.delta)
        if delivery.outcome is not None:
            self.outcomes.append(delivery.outcome)
            self._open -= 1
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
