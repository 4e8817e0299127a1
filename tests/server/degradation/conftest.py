"""A server that degrades, for everybody."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.server.degradation.ladder import EVERYBODY, LADDER, POOLS
from tests.server.fakes import FakeEngine, say
from tests.server.serving import Server, serving


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(FakeEngine(say("A long answer")), degradation=LADDER, pools=POOLS, local=EVERYBODY) as server:
        yield server
