"""Reading a request's body: one JSON object, of the right type, within the size and time that are allowed.

Owns the refusals 408, 413 and 415. It must not know what the fields mean.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from minserve.request import RequestError
from minserve.server.errors import from_http
from minserve.server.json_body import parse_object

_BODY_SECONDS = 60.0


async def read_fields(request: web.Request) -> dict[str, Any]:
    """The body's fields. RequestError 400, 408, 415, and 413 beyond the application's client_max_size."""
    if request.content_type != "application/json":
        raise RequestError(
            "Send the body as JSON, with the header Content-Type: application/json.",
            status=415,
            code="unsupported_media_type",
        )
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise RequestError("Compressed request bodies are not accepted.", status=415, code="unsupported_encoding")
    try:
        if (request.content_length or 0) > request.client_max_size:
            raise web.HTTPRequestEntityTooLarge(request.client_max_size)
        async with asyncio.timeout(_BODY_SECONDS):
            body = await request.read()
    except TimeoutError:
        raise RequestError("The request body came too slowly.", status=408, code="body_timeout") from None
    except web.HTTPRequestEntityTooLarge as error:
        raise from_http(error) from None
    return parse_object(body)
