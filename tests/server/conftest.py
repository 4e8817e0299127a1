"""A server with its defaults, a scripted engine behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.server.serving import Server, serving


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as server:
        yield server
