"""One Chromium for all tests of a process, and pages in it that may have no script error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, async_playwright

from tests.server.browser.pages import CHROMIUM, Open
from tests.server.serving import Server

ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="session")
async def open_page(browser: Browser) -> AsyncIterator[Open]:
    """Opens a server's page; a script error anywhere fails the test."""
    errors: list[str] = []
    contexts: list[BrowserContext] = []

    async def open_page(server: Server, path: str = "/", **options: Any) -> Page:
        contexts.append(await browser.new_context(**options))
        page = await contexts[-1].new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if "Security Policy" in message.text else None)
        await page.goto(server.url + path)
        return page

    yield open_page
    for context in contexts:
        await context.close()
    assert errors == []
