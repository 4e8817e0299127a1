"""The unchanged openai package against the real engine, for the five controls.

Each control refuses with its status, code, message and headers before anything is computed: the prefill counters of
/metrics do not move.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from minserve.config import KeyConfig, PricesConfig
from tests.server.real import real_server
from tests.server.serving import MODEL, Server, keyed

PRICES = PricesConfig(prefill=100.0, decode=100.0)  # a token costs 0.0001
NOW = 1_800_000_010.0  # 2027-01-15 08:00:10 UTC
ROOT = keyed("root", user="root", admin=True)


class Caller:
    """A server and the openai client of one key."""

    def __init__(self, server: Server, client: openai.AsyncOpenAI) -> None:
        self.server = server
        self.client = client

    def ask(self, prompt: str = "Hi", tokens: int = 4, **more: Any) -> Awaitable[Any]:
        """Two prompt tokens and four more unless said otherwise: all of them, whatever the model says."""
        extra = {"ignore_eos": True, **more.pop("extra", {})}
        return self.client.completions.create(model=MODEL, prompt=prompt, max_tokens=tokens, extra_body=extra, **more)

    async def chat(self, text: str, **more: Any) -> Any:
        return await self.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], **more
        )

    async def refused(self, call: Awaitable[Any], status: int, code: str) -> openai.APIStatusError:
        """The error of a call that must be refused, with nothing computed for it and one row of its own."""
        await self.server.settled()
        before, rows = await self.computed(), len(self.server.rows)
        with pytest.raises(openai.APIStatusError) as caught:
            await call
        assert (caught.value.status_code, caught.value.code) == (status, code)
        assert await self.computed() == before
        (row,) = self.server.rows[rows:]
        assert (row.finish, row.status, row.code, row.cost, row.prompt_tokens) == ("refused", status, code, 0, 0)
        return caught.value

    async def computed(self) -> tuple[float, float]:
        """(prompt tokens that were billed, tokens of all steps) so far, as /metrics says."""
        admin = {"Authorization": "Bearer root"}
        async with self.server.session.get(self.server.url + "/metrics", headers=admin) as response:
            page = await response.text()
        return tuple(  # type: ignore[return-value]
            sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE))
            for name in ("vllm:prompt_tokens_total", "vllm:iteration_tokens_total_sum")
        )


@asynccontextmanager
async def calling(key: KeyConfig | None = None, **sections: Any) -> AsyncIterator[Caller]:
    keys = {"a": key or keyed("secret"), "root": ROOT, **sections.pop("keys", {})}
    async with real_server(keys=keys, **sections) as (server, _), sdk(server, "secret") as client:
        server.services.accounting.clock = lambda: NOW  # so that no period ends within a test
        yield Caller(server, client)


def sdk(server: Server, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=key)


def of(caller: Caller, secret: str) -> Caller:
    """The same server with another key."""
    return Caller(caller.server, caller.client.with_options(api_key=secret))
