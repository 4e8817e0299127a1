"""The two routes that generate: /v1/chat/completions and /v1/completions.

Owns the order of things: read, prepare, run, answer as one body or as a stream. Everything that can be refused is
refused before headers go out, so that it has its real status. What a body means is `calls.py`'s business, ends the
gateway's.
"""

from __future__ import annotations

import logging

from aiohttp import web

from minserve.request import RequestError
from minserve.server.answer import Answer
from minserve.server.calls import CHAT, COMPLETIONS, Calls
from minserve.server.errors import unexpected
from minserve.server.generation import Call, Generation
from minserve.server.http_input import read_fields
from minserve.server.services import VISIT, Services, identity_of
from minserve.server.sse import EventStream
from minserve.server.wire import to_json

log = logging.getLogger("minserve.server")

_STATE_SECONDS = 0.25  # how often a waiting reader is told what has changed


class GenerateRoutes:
    def __init__(self, services: Services) -> None:
        self._s = services
        self._calls = Calls(services)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, CHAT)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, COMPLETIONS)

    async def _generate(self, request: web.Request, endpoint: str) -> web.StreamResponse:
        arrival = self._calls.arrival(endpoint, identity_of(request))
        request[VISIT].record(arrival.id)
        with self._s.gateway.refusals(arrival) as known:
            prepared = await self._calls.prepare(known, await read_fields(request), request.headers)
        request[VISIT].identity = prepared.call.identity  # narrowed: rate-limit headers are those of its end user
        if prepared.stream:
            return await self._stream(request, prepared.call, prepared.answer)
        body, generation = await self._calls.whole(prepared)
        return web.Response(body=to_json(body), content_type="application/json", headers=generation.headers)

    async def _stream(self, request: web.Request, call: Call, answer: Answer) -> web.StreamResponse:
        events: EventStream | None = None
        try:
            async with self._s.gateway.run(call) as generation:
                timeouts = self._s.config.timeouts
                events = await EventStream.open(
                    request, generation.headers, stall_s=timeouts.write_stall_s, first_comment=_state(generation)
                )
                if generation.fixed:
                    answer.plain()
                await self._pump(generation, answer, events)
        except RequestError as error:
            if events is None:
                raise
            await events.fail(error)
        except ConnectionError:
            if events is None:
                raise
        except Exception as error:
            if events is None:
                raise
            log.exception("a stream failed")
            await events.fail(unexpected(error))
        else:
            await events.finish()
        assert events is not None
        return events.response

    async def _pump(self, generation: Generation, answer: Answer, events: EventStream) -> None:
        """Events as they come; what the reader waits for while nothing comes."""
        keep_alive = self._s.config.timeouts.sse_keep_alive_s
        told = _state(generation)
        while not generation.done:
            deltas = await generation.read(keep_alive if generation.begun else min(keep_alive, _STATE_SECONDS))
            if data := answer.events(deltas, generation.tally):
                await events.send(data)
            elif not generation.begun and (state := _state(generation)) != told:
                told = state
                await events.comment(state)
            elif events.silent_for >= keep_alive:
                await events.comment("keep-alive")
        if data := answer.closing(generation):
            await events.send(data)


def _state(generation: Generation) -> str:
    """`queued 3` (requests ahead) or `prefill 120/400` (prompt tokens read so far)."""
    progress = generation.progress
    if progress.phase == "queued":
        return f"queued {progress.ahead}"
    return f"prefill {progress.computed}/{progress.prompt}"
