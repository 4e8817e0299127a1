"""A stream, opened, and the error that one ended with."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from tests.server.serving import COMPLETION, Server

STREAM = {**COMPLETION, "stream": True}


async def open_stream(server: Server, body: Any = STREAM) -> aiohttp.ClientResponse:
    response = await server.session.post(server.url + "/v1/completions", json=body)
    assert response.status == 200
    return response


def error_event(text: str) -> dict[str, Any]:
    """The error of a stream that ended with one, as every such stream must: error, then [DONE], once."""
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    error: dict[str, Any] = json.loads(events[-2])["error"]
    return error
