"""Server-sent events on one response: whole events per write, comments in between, an end for stalled readers.

Owns the headers, the framing and the write timeout. It must not know what the events hold.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from aiohttp import web

from minserve.request import RequestError
from minserve.server.ending import ClientStalled
from minserve.server.errors import error_body
from minserve.server.wire import DONE, event

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",  # nginx: pass events on as they come
}

_AT_ONCE = 16 * 1024  # bytes that fit a transport's empty buffer without making it wait


class EventStream:
    """Use `open`, then `send` and `comment`, then `finish` or `fail`: both end with [DONE], exactly once."""

    def __init__(self, request: web.Request, response: web.StreamResponse, stall_s: float) -> None:
        self._request = request
        self._stall_s = stall_s
        self.response = response
        self._clock = asyncio.get_running_loop().time
        self._written = self._clock()

    @classmethod
    async def open(
        cls, request: web.Request, headers: Mapping[str, str], *, stall_s: float, first_comment: str
    ) -> EventStream:
        """Send the headers and a first comment at once: proxies and readers see that the request was accepted."""
        response = web.StreamResponse(headers={**HEADERS, **headers})
        await response.prepare(request)
        stream = cls(request, response, stall_s)
        await stream.comment(first_comment)
        return stream

    @property
    def silent_for(self) -> float:
        """Seconds since the last write."""
        return self._clock() - self._written

    async def send(self, data: bytes) -> None:
        """Write whole events. ClientStalled if the reader does not take them, ConnectionError if it is gone."""
        transport = self._request.transport
        if transport is not None and len(data) < _AT_ONCE and transport.get_write_buffer_size() == 0:
            await self.response.write(data)  # can't wait, so it needs no timer: nearly every token goes this way
        else:
            await self._send_slowly(data)
        self._written = self._clock()

    async def _send_slowly(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self.response.write(data)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientStalled from None

    async def comment(self, text: str) -> None:
        """A line that every parser ignores: it keeps proxies awake and finds out whether the reader is still there."""
        await self.send(f": {text}\n\n".encode())

    async def finish(self) -> None:
        with contextlib.suppress(ConnectionError):
            await self.send(DONE)
            await self.response.write_eof()

    async def fail(self, error: RequestError) -> None:
        """The status is already 200, so the error is an event; never a bare, truncated stream."""
        with contextlib.suppress(ConnectionError):
            await self.send(event(error_body(error, in_stream=True)))
        await self.finish()
