"""Pages of other origins in headless Chromium: a listed one streams with a short-lived token, all others are refused.

The page comes from a server of its own on another port, as somebody's site would; nothing of it is ours but client.js.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from playwright.async_api import Page, expect

from minserve.config import LimitConfig, ServerConfig
from minserve.economics.tokens import PageTokens
from minserve.request import FinishReason, RequestError, TextDelta, Usage
from tests.server.browser.pages import IN_BROWSER, Open, finish, tokens
from tests.server.fakes import FakeEngine, say
from tests.server.serving import Server, keyed, serving

pytestmark = IN_BROWSER

KEY = "ms-a-long-lived-key"
HTML = """<!doctype html><title>Somebody's page</title><p id="answer"></p><p id="trouble"></p>
<script type="module">
  window.ask = async (from, fields) => {
    const { chat, ApiError } = await import(`${from}/client.js`);
    try {
      for await (const event of chat({ messages: [{ role: "user", content: "Hi" }], ...fields })) {
        if (event.type === "text") answer.textContent += event.text;
      }
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      trouble.textContent = `${error.status} ${error.code}: ${error.message}`;
      window.retryAfter = error.retryAfter;
    }
  };
</script>"""


@dataclass
class Site:
    """Somebody's web server. url: its origin."""

    url: str


@asynccontextmanager
async def site(host: str = "127.0.0.1") -> AsyncIterator[Site]:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text=HTML, content_type="text/html")

    async def client(_: web.Request) -> web.Response:
        code = resources.files("minserve.server").joinpath("static/client.js").read_text(encoding="utf-8")
        return web.Response(text=code, content_type="text/javascript")

    app = web.Application()
    app.add_routes([web.get("/", page), web.get("/client.js", client)])
    async with TestServer(app) as server:
        yield Site(f"http://{host}:{server.port}")


@asynccontextmanager
async def server_for(*origins: str, engine: FakeEngine | None = None, **key: Any) -> AsyncIterator[Server]:
    """A server with one key that lists these origins."""
    config = ServerConfig(allowed_origins=origins)
    async with serving(engine or FakeEngine(say("Hello")), server=config, keys={"ann": keyed(KEY, **key)}) as server:
        yield server


def token(origin: str, ttl_s: float = 600.0, age_s: float = 0.0) -> str:
    """What `minserve keys token` prints; the secret is that of the servers of `fakes`."""
    digest = hashlib.sha256(KEY.encode()).digest()
    issued = time.time() - age_s
    return PageTokens(b"0" * 32).issue("ann", digest, origin=origin, ttl_s=ttl_s, max_tokens=5000, now=issued)


async def ask(page: Page, server: Server, key: str, *, client: str = "", **fields: Any) -> None:
    await page.evaluate(
        "([from, fields]) => ask(from, fields)",
        [client or server.url + "/static", {"url": server.url, "key": key, **fields}],
    )


async def trouble(page: Page, text: str) -> None:
    await expect(page.locator("#trouble")).to_contain_text(text)
    await expect(page.locator("#answer")).to_have_text("")


async def test_a_listed_page_streams_with_its_token(open_page: Open) -> None:
    async with site() as home, server_for(home.url, engine=FakeEngine(None)) as server:
        page = await open_page(home)
        running = asyncio.ensure_future(ask(page, server, token(home.url)))
        stream = await server.engine.stream()
        tokens(stream, "Hello ")
        await expect(page.locator("#answer")).to_have_text("Hello ")  # before the answer is complete
        assert not running.done()
        tokens(stream, "there")
        finish(stream)
        await running
        await expect(page.locator("#answer")).to_have_text("Hello there")
        await expect(page.locator("#trouble")).to_have_text("")
        await server.settled()
        (row,) = server.rows
        assert (row.key, row.status) == ("ann", 200)


async def test_leaving_the_listed_page_stops_the_work(open_page: Open) -> None:
    async with site() as home, server_for(home.url, engine=FakeEngine(None)) as server:
        page = await open_page(home)
        running = asyncio.ensure_future(ask(page, server, token(home.url)))
        stream = await server.engine.stream()
        tokens(stream, "Hello")
        await expect(page.locator("#answer")).to_have_text("Hello")
        await page.close()
        await asyncio.gather(running, return_exceptions=True)
        await server.settled()
        assert stream.closed


async def test_a_listed_page_reads_the_headers_that_tell_it_what_to_do(open_page: Open) -> None:
    refusal = RequestError("256 requests wait already.", status=503, code="queue_full", retry_after=7)
    limit = LimitConfig(period="day", requests=5)
    async with site() as home, server_for(home.url, limits=(limit,)) as server:
        page = await open_page(home)
        script = """async ([url, key]) => {
            const headers = { Authorization: `Bearer ${key}`, "Content-Type": "application/json", "X-Run-ID": "r" };
            const body = JSON.stringify({ messages: [{ role: "user", content: "Hi" }] });
            const reply = await fetch(`${url}/v1/chat/completions`, { method: "POST", headers, body });
            const names = ["x-request-id", "x-ratelimit-remaining-requests"];
            return [reply.status, ...names.map((name) => reply.headers.get(name))];
        }"""
        status, request_id, left = await page.evaluate(script, [server.url, token(home.url)])
        assert (status, left) == (200, "4")
        assert request_id == server.rows[0].id
        server.engine.refusal = refusal
        await ask(page, server, token(home.url))
        await trouble(page, "503 queue_full: 256 requests wait already.")
        assert await page.evaluate("retryAfter") == 7


async def test_a_page_of_an_unlisted_origin_is_told_why_nothing_came(open_page: Open) -> None:
    async with site() as home, site() as wrong, server_for(home.url) as server:
        page = await open_page(wrong)
        for key in (token(home.url), token(wrong.url), KEY):
            await ask(page, server, key, client=wrong.url)
            await trouble(
                page, f"0 unreachable: The server can't be reached, or it doesn't list {wrong.url} in server."
            )
        assert server.engine.submissions == []


async def test_a_token_works_on_its_own_page_only(open_page: Open) -> None:
    async with site() as home, site("localhost") as other, server_for(home.url, other.url) as server:
        page = await open_page(other)
        await ask(page, server, token(home.url))
        await trouble(page, "403 origin_mismatch: The page token belongs to another origin.")
        assert server.engine.submissions == []


# bug: 48
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("expired", "401 invalid_page_token: The page token is not valid or has expired."),
        ("altered", "401 invalid_page_token: The page token is not valid or has expired."),
        ("no token at all", "401 missing_api_key"),
    ],
)
async def test_a_token_that_is_no_longer_one_is_refused_in_words(open_page: Open, change: str, message: str) -> None:
    async with site() as home, server_for(home.url) as server:
        page = await open_page(home)
        good = token(home.url)
        altered = good[:-4] + ("AAAA" if good[-4:] != "AAAA" else "BBBB")
        key = {"expired": token(home.url, ttl_s=60, age_s=61), "altered": altered}.get(change, "")
        await ask(page, server, key)
        await trouble(page, message)
        assert server.engine.submissions == []


async def test_a_token_that_expires_during_an_answer_lets_it_end_and_begins_no_other(open_page: Open) -> None:
    async with site() as home, server_for(home.url, engine=FakeEngine(None)) as server:
        page = await open_page(home)
        key = token(home.url, ttl_s=60, age_s=59)
        running = asyncio.ensure_future(ask(page, server, key))
        stream = await server.engine.stream()
        await asyncio.sleep(1.1)
        stream.push(TextDelta(0, "late", (1,)))
        stream.push(TextDelta(0, finish=FinishReason.STOP, usage=Usage(5, 0, 1)))
        await running
        await expect(page.locator("#answer")).to_have_text("late")
        await ask(page, server, key)
        await expect(page.locator("#trouble")).to_contain_text("401 invalid_page_token")
        assert len(server.engine.submissions) == 1
