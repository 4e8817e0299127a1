"""Requests as bytes, the shape of an error, and two keys: for tests of what goes over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.server.serving import Server, keyed

KEYS = {"ann": keyed("secret"), "root": keyed("admin-secret", admin=True)}
ANN = {"Authorization": "Bearer secret"}
ROOT = {"Authorization": "Bearer admin-secret"}


async def raw(server: Server, request: bytes) -> int:
    """The status of a request sent as it is, with no client library that tidies paths in between."""
    return int((await raw_answer(server, request)).split()[1])


async def raw_answer(server: Server, request: bytes) -> bytes:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    await writer.drain()
    data = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await writer.wait_closed()
    return data


def error(status: int, body: Any) -> Any:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["code"], str)
    return body["error"]
