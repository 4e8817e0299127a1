"""A server around an engine, the scripted one unless told otherwise; a model for it, keys, and calls to send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from msgspec import structs

from minserve.config import Config, KeyConfig
from minserve.economics.accounting import Accounting
from minserve.economics.keys import digest
from minserve.economics.ledger import Ledger
from minserve.economics.rows import Row
from minserve.server.app import create_app
from minserve.server.services import ServedModel, Services
from minserve.server.site import Site, address_of, bind
from minserve.server.telemetry import Telemetry
from minserve.text.template import ChatTemplate
from minserve.text.tokenizer import Tokenizer
from minserve.weights.dummy import load_dummy
from tests.server.fakes import FakeEngine

MODEL = "tiny"
CONTEXT = 512


def tiny_model(**changes: Any) -> ServedModel:
    loaded = load_dummy("dummy:llama-tiny")
    tokenizer = Tokenizer.from_source(loaded.tokenizer)
    model = ServedModel(
        name=MODEL,
        tokenizer=tokenizer,
        template=ChatTemplate(loaded.chat_template, tokenizer),
        vocab_size=tokenizer.vocab_size,
        max_model_len=CONTEXT,
        created=1_700_000_000,
    )
    return replace(model, **changes)


@dataclass
class Server:
    """A running server and everything a test wants to look at."""

    url: str
    engine: Any
    services: Services
    session: aiohttp.ClientSession
    site: Site
    rows: list[Row] = field(default_factory=list)

    async def post(self, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        """(status, decoded body); `body` is sent as JSON unless it is bytes."""
        if isinstance(body, bytes):
            more = {"data": body, "headers": {"Content-Type": "application/json", **more.pop("headers", {})}, **more}
        else:
            more = {"json": body, **more}
        async with self.session.post(self.url + path, **more) as response:
            return response.status, await response.json(content_type=None)

    async def get(self, path: str, **more: Any) -> tuple[int, Any]:
        async with self.session.get(self.url + path, **more) as response:
            return response.status, await response.json(content_type=None)

    async def events(self, path: str, body: Any) -> str:
        """The whole text of a stream."""
        async with self.session.post(self.url + path, json={"stream": True, **body}) as response:
            assert response.status == 200, await response.text()
            return await response.text()

    async def settled(self) -> None:
        """Wait until nothing runs any more."""
        for _ in range(500):
            if not self.services.gateway.live and not self.engine.status().streams:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("calls are still open")


@asynccontextmanager
async def serving(
    runs: Any = None, *, model: ServedModel | None = None, book: Ledger | None = None, **sections: Any
) -> AsyncIterator[Server]:
    """A server on a free port around an engine; `sections` replace sections of the configuration."""
    engine = runs or FakeEngine()
    model = model or tiny_model()
    config = structs.replace(Config(), **sections)
    rows: list[Row] = []
    telemetry = Telemetry(model.name, config)
    telemetry.watch(engine.status, {"block_size": "16"})

    def on_row(row: Row) -> None:
        rows.append(row)
        telemetry.row(row)

    accounting = Accounting(config, ledger=book, token_secret=b"0" * 32, on_row=on_row)
    services = Services.of(config, model, engine, accounting, telemetry)
    sock = bind("127.0.0.1", 0)
    site = Site(sock)
    await site.serve(create_app(services))
    async with aiohttp.ClientSession() as session:
        try:
            yield Server(address_of(sock), engine, services, session, site, rows)
        finally:
            await site.close()
            services.text.close()
            await accounting.close()


def keyed(secret: str, **fields: Any) -> KeyConfig:
    return KeyConfig(sha256=digest(secret).hex(), user=fields.pop("user", "ann"), **fields)


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": MODEL, "prompt": "Hi"}
