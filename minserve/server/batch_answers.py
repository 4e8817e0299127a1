"""Who answers the lines of a batch: an engine of this process, or (`batch_server.py`) a server that runs already.

Owns what both have in common, and the engine's side: lines take the same way as HTTP requests (`calls.py`,
`gateway.py`), with the same checks, caps and ledger rows. It must not know files, nor what is tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import structs

from minserve.assemble import Say
from minserve.async_engine import GAVE_UP
from minserve.backend.base import BackendError
from minserve.config import Config
from minserve.economics.keys import Identity
from minserve.request import Pool, RequestError
from minserve.server.batch_lines import Line
from minserve.server.calls import Calls
from minserve.server.errors import error_body
from minserve.server.json_body import parse_object
from minserve.server.serve import opened
from minserve.server.services import Services

_READERS = 32  # lines that are tokenized at once; the tokenizer's queue is short


@dataclass(frozen=True, slots=True)
class Reply:
    """What one try of a line brought. error: why it is no answer; then `body` is OpenAI's error object."""

    id: str
    status: int
    body: Any
    degraded: str = ""
    error: RequestError | None = None

    @classmethod
    def failed(cls, request_id: str, error: RequestError) -> Reply:
        return cls(request_id, error.status, error_body(error), error=error)


class Answers(Protocol):
    async def answer(self, line: Line) -> Reply:
        """Try a line once, in the bulk pool. BackendError if no line can be answered any more."""
        ...

    async def end(self, patience: float) -> None:
        """What runs has `patience` seconds to end; then its reply is an error with the code `shutting_down`."""
        ...


def refuse_stream(fields: Mapping[str, Any]) -> None:
    if fields.get("stream"):
        raise RequestError("A line of a batch can't be streamed.", param="stream")


@asynccontextmanager
async def engine_answers(
    config: Config, api_key: str | None, say: Say, stop: asyncio.Event
) -> AsyncIterator[Answers | None]:
    """Ledger, weights and engine in this process. None: told to stop meanwhile. RequestError 401 for a wrong key."""
    async with opened(config, say, stop) as services:
        if services is None:
            yield None
            return
        yield EngineAnswers(services, api_key)
        await services.gateway.settled(config.timeouts.step_s)


class EngineAnswers:
    def __init__(self, services: Services, api_key: str | None) -> None:
        self._s = services
        self._calls = Calls(services)
        self._identity = _bulk(services, api_key)
        self._reading = asyncio.Semaphore(_READERS)

    async def answer(self, line: Line) -> Reply:
        arrival = self._calls.arrival(line.url, self._identity)
        try:
            with self._s.gateway.refusals(arrival) as known:
                async with self._reading:
                    fields = parse_object(line.body)
                    prepared = await self._calls.prepare(known, fields, {})
                    refuse_stream(fields)
            body, generation = await self._calls.whole(prepared)
        except RequestError as error:
            if error.code in GAVE_UP:
                raise BackendError(error.message) from None
            return Reply.failed(arrival.id, error)
        return Reply(arrival.id, 200, body, generation.degraded)

    async def end(self, patience: float) -> None:
        await self._s.engine.drain(patience)


def _bulk(services: Services, api_key: str | None) -> Identity:
    """The account that pays, with bulk as its pool. RequestError 401 if keys are configured and this is none."""
    identity = services.accounting.identify(f"Bearer {api_key}" if api_key else None)
    return structs.replace(identity, account=structs.replace(identity.account, pool=Pool.BULK.value))
