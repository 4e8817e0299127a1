"""The two routes that generate: /v1/chat/completions and /v1/completions.

Owns the order of things: read, prepare, run, answer as one body or as a stream. Everything that can be refused is
refused before headers go out, so that it has its real status. What a body means is `calls.py`'s business, ends the
gateway's.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from minserve.request import RequestError, TextDelta
from minserve.server.answer import Answer
from minserve.server.arrival import Call
from minserve.server.calls import CHAT, COMPLETIONS, Calls
from minserve.server.generation import Generation
from minserve.server.http_input import read_fields
from minserve.server.services import VISIT, Services, identity_of
from minserve.server.sse import EventStream
from minserve.server.wire import to_json

_STATE_SECONDS = 0.25  # how often a waiting reader is told what has changed
_PAUSED = "paused"


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
                early = await self._hold(generation)
                stall_s = self._s.config.timeouts.write_stall_s
                events = await EventStream.open(
                    request, generation.headers, stall_s=stall_s, first_comment=_state(generation)
                )
                if generation.static:
                    answer.plain()
                await self._pump(generation, answer, events, early)
        except RequestError as error:
            if events is None:
                raise
            await events.fail(error)
        except ConnectionError:
            if events is None:
                raise
        else:
            await events.finish()
        assert events is not None
        return events.response

    async def _hold(self, generation: Generation) -> list[TextDelta]:
        """Keep the status line back in a queue whose ceiling comes before the first keep-alive would be due: who waits
        too long there gets a real 503. What came meanwhile."""
        clock, keep_alive = asyncio.get_running_loop().time, self._s.config.timeouts.sse_keep_alive_s
        deltas: list[TextDelta] = []
        if generation.timeouts.queue < keep_alive:
            until = clock() + keep_alive
            while not deltas and generation.progress.phase == "queued" and clock() < until:
                deltas = await generation.read(_STATE_SECONDS)
        return deltas

    async def _pump(self, generation: Generation, answer: Answer, events: EventStream, deltas: list[TextDelta]) -> None:
        """Events as they come, `deltas` first; what the reader waits for while nothing comes."""
        keep_alive = self._s.config.timeouts.sse_keep_alive_s
        told = _state(generation)
        while True:
            if data := answer.events(deltas, generation.tally):
                told = ""
                await events.send(data)
            elif (state := _state(generation)) != told and (state == _PAUSED or not generation.begun):
                told = state
                await events.comment(state)
            elif events.silent_for >= keep_alive:
                await events.comment("keep-alive")
            if generation.done:
                break
            deltas = await generation.read(min(keep_alive, _STATE_SECONDS))
        if data := answer.closing(generation):
            await events.send(data)


def _state(generation: Generation) -> str:
    """`paused` (bulk, under load), `queued 3` (requests ahead) or `prefill 120/400` (prompt tokens read so far)."""
    if generation.paused:
        return _PAUSED
    progress = generation.progress
    if progress.phase == "queued":
        return f"queued {progress.ahead}"
    return f"prefill {progress.computed}/{progress.prompt}"
