"""What somebody does at a page, and what the scripted engine behind it says."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable

import pytest
from playwright.async_api import Page, expect

from minserve.request import FinishReason, TextDelta, Usage
from tests.server.fakes import FakeStream
from tests.server.serving import Server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
IN_BROWSER = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),  # one browser for all tests, so one loop
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt-get install chromium)"),
]
Open = Callable[..., Awaitable[Page]]


async def send(page: Page, text: str) -> None:
    await page.locator("#input").fill(text)
    await page.keyboard.press("Enter")


async def begin(page: Page, server: Server, question: str, text: str) -> FakeStream:
    """Ask; the stream of the answer, of which the page shows `text` by now."""
    await send(page, question)
    stream = await server.engine.stream()
    tokens(stream, text)
    await expect(page.locator(".content")).to_have_text(text)
    return stream


async def idle(page: Page) -> None:
    await expect(page.get_by_role("button", name="Send")).to_be_visible()


def tokens(stream: FakeStream, text: str) -> None:
    stream.push(TextDelta(0, text, tuple(text.encode())))


def finish(stream: FakeStream, reason: FinishReason = FinishReason.STOP, completion: int = 5) -> None:
    stream.push(TextDelta(0, finish=reason, usage=Usage(len(stream.submission.prompt), 0, completion)))
