"""What the server needs of an engine. `minserve.async_engine.AsyncEngine` and its `Stream` are what really stands here.

Owns no code. Tests put a scripted engine in its place.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from minserve.request import Pool, RequestError, RequestOutcome, Submission, TextDelta
from minserve.status import EngineStatus, LiveRequest, PromptProgress, State


class Reader(Protocol):
    """Yields everything that is new since the last read. Cancelling a read loses nothing."""

    def __aiter__(self) -> AsyncIterator[list[TextDelta]]: ...

    async def __anext__(self) -> list[TextDelta]: ...


class TokenStream(Reader, Protocol):
    """One submission: at its end every choice has delivered a delta with `finish` and an outcome."""

    @property
    def outcomes(self) -> list[RequestOutcome]: ...

    @property
    def progress(self) -> PromptProgress: ...

    @property
    def done(self) -> bool: ...

    def close(self) -> None:
        """Abort what is unfinished; idempotent. Outcomes of what runs in a step right now come after the step."""
        ...


class ServingEngine(Protocol):
    @property
    def state(self) -> State: ...

    def submit_all(self, submissions: Sequence[Submission]) -> Sequence[TokenStream]:
        """A call's, all or none. RequestError 400 if one can never fit, 503 if nothing more is taken now."""
        ...

    def abort(self, submission_id: str, error: RequestError | None = None) -> bool: ...

    def status(self) -> EngineStatus: ...

    def requests(self) -> list[LiveRequest]: ...

    def wait(self, pool: Pool) -> float:
        """Seconds until a call of this pool that comes now would start."""
        ...

    def pause(self, pools: Callable[[], frozenset[Pool]]) -> None:
        """Ask `pools` before every step which pools get nothing in it."""
        ...

    async def drain(self, timeout: float) -> None: ...

    async def stop(self) -> None: ...
