"""The live view, and both pages over a real engine."""

from __future__ import annotations

import asyncio

from playwright.async_api import expect

from minserve.async_engine import AsyncEngine
from minserve.request import Pool
from tests.engines import tiny
from tests.server.browser.pages import IN_BROWSER, Open, finish, idle, send
from tests.server.fakes import FakeEngine
from tests.server.serving import CHAT, keyed, serving

pytestmark = IN_BROWSER


async def test_the_live_view_follows_the_engine(open_page: Open) -> None:
    async with serving(FakeEngine(None)) as server:
        page = await open_page(server, "/static/blocks.html")
        await expect(page.locator("#free")).to_have_text("100 free")
        answer = asyncio.ensure_future(server.events("/v1/chat/completions", CHAT))
        stream = await server.engine.stream()
        await expect(page.locator("#held")).to_have_text("1 held")
        await expect(page.locator("#pools")).to_contain_text("interactive: 1 running")
        await expect(page.get_by_role("region", name="Requests", exact=True)).to_have_count(1)
        await page.get_by_role("button", name="Pause").click()
        await expect(page.get_by_role("button", name="Go on")).to_have_attribute("aria-pressed", "true")
        finish(stream)
        await answer


async def test_the_live_view_asks_for_the_administrators_key(open_page: Open) -> None:
    async with serving(FakeEngine(), keys={"root": keyed("admin-secret", admin=True)}) as server:
        page = await open_page(server, "/static/blocks.html")
        await page.get_by_label("API key").fill("admin-secret")
        await page.get_by_role("button", name="Use it").click()
        await expect(page.locator("#free")).to_have_text("100 free")


async def test_a_real_engine_answers_in_the_browser(open_page: Open) -> None:
    engine = AsyncEngine(tiny().engine, max_queue=dict.fromkeys(Pool, 16))
    await engine.start()
    try:
        async with serving(engine) as server:
            page = await open_page(server)
            await page.get_by_role("button", name="Settings").click()
            await page.get_by_label("Longest answer").fill("16")
            await page.get_by_role("button", name="Done").click()
            await send(page, "Hi")
            await idle(page)
            await expect(page.locator(".stats")).to_contain_text("tokens")
            await expect(page.get_by_role("alert")).to_be_hidden()
            await server.settled()
            live = await open_page(server, "/static/blocks.html")
            await expect(live.locator("#held")).to_have_text("0 held")
    finally:
        await engine.stop()
