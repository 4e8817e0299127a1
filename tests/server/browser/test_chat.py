"""The chat page: an answer in all its states, stopped, cut, and gone on with."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from playwright.async_api import expect

from minserve.config import PoolConfig, PoolsConfig
from minserve.request import FinishReason
from minserve.status import PromptProgress
from minserve.text.template import ChatTemplate
from tests.server.browser.pages import IN_BROWSER, Open, begin, finish, idle, send, tokens
from tests.server.fakes import FakeEngine, say
from tests.server.serving import MODEL, serving, tiny_model

pytestmark = IN_BROWSER


async def test_chats_shows_every_state_and_keeps_the_conversation(open_page: Open) -> None:
    async with serving(FakeEngine(None)) as server:
        page = await open_page(server)
        await expect(page.locator("#model")).to_have_text(MODEL)
        await send(page, "Hi <b>there</b>")
        stream = await server.engine.stream()
        state = page.locator(".state")
        stream.progress = PromptProgress("queued", 0, 40, 2)
        await expect(state).to_have_text("Waiting, 2 ahead")
        stream.progress = PromptProgress("prefill", 16, 40, 0)
        await expect(state).to_have_text("Reading the prompt, 16 of 40 tokens")
        await expect(page.get_by_label("Prompt read")).to_have_attribute("value", "16")
        tokens(stream, "Hello **world**")
        await expect(page.locator(".writing strong")).to_have_text("world")
        await expect(state).to_be_hidden()
        tokens(stream, ", <img src=x onerror=alert(1)>")
        finish(stream)
        await idle(page)
        await expect(page.locator(".content")).to_have_text("Hello world, <img src=x onerror=alert(1)>")
        await expect(page.locator(".stats")).to_have_text(re.compile(r"First token \d.*5 tokens"))
        assert await page.locator(".message img, .bubble b").count() == 0
        await page.reload()
        await expect(page.locator(".bubble")).to_have_text("Hi <b>there</b>")
        await expect(page.locator(".content")).to_have_text("Hello world, <img src=x onerror=alert(1)>")
        await expect(page.locator("#input")).to_be_focused()


async def test_a_short_queue_is_visible_before_the_server_says_anything(open_page: Open) -> None:
    pools = PoolsConfig(interactive=PoolConfig(queue_timeout_s=5.0))
    async with serving(FakeEngine(None), pools=pools) as server:
        page = await open_page(server)
        await send(page, "Hi")
        stream = await server.engine.stream()
        await expect(page.locator(".state")).to_have_text("Waiting for a seat")
        await expect(page.locator("#announcer")).to_have_text("Waiting for a seat")
        stream.progress = PromptProgress("prefill", 16, 40, 0)
        await expect(page.locator(".state")).to_have_text("Reading the prompt, 16 of 40 tokens")
        tokens(stream, "Hello")
        await expect(page.locator(".content")).to_have_text("Hello")
        finish(stream)
        await idle(page)


@pytest.mark.parametrize("how", ["button", "escape", "reload", "new chat"])
async def test_stopping_an_answer_stops_the_work(open_page: Open, how: str) -> None:
    async with serving(FakeEngine(None)) as server:
        page = await open_page(server)
        stream = await begin(page, server, "Tell me everything", "It began")
        if how == "button":
            await page.get_by_role("button", name="Stop").click()
        elif how == "escape":
            await page.keyboard.press("Escape")
        elif how == "reload":
            await page.reload()
        else:
            await page.get_by_role("button", name="New chat").click()
        await idle(page)
        await server.settled()
        assert stream.closed
        if how == "new chat":
            await expect(page.locator(".message")).to_have_count(0)
            await page.get_by_role("button", name="Bring back").click()
        await expect(page.locator(".content")).to_have_text("It began")
        await expect(page.locator(".stats")).to_contain_text("stopped")


async def test_an_answer_that_a_reload_cut_goes_on(open_page: Open) -> None:
    async with serving(FakeEngine(None)) as server:
        page = await open_page(server)
        await begin(page, server, "Tell me everything", "It began")
        # A browser that cuts the connection before the page hears that it is left.
        await page.evaluate("dispatchEvent(new Event('beforeunload'))")
        assert server.site.server is not None
        for connection in server.site.server.connections:
            assert connection.transport is not None
            connection.transport.abort()
        await idle(page)
        await expect(page.locator(".stats")).to_contain_text("stopped")
        await page.reload()
        await expect(page.get_by_role("button", name="Continue")).to_be_visible()
        await expect(page.locator(".failure")).to_be_hidden()


async def test_a_cut_answer_goes_on_where_it_ended(open_page: Open) -> None:
    async with serving(FakeEngine(None)) as server:
        page = await open_page(server)
        await send(page, "Count")
        stream = await server.engine.stream()
        tokens(stream, "one, two")
        finish(stream, FinishReason.LENGTH)
        await expect(page.locator(".stats")).to_contain_text("cut off at the limit")
        server.engine.arrived.clear()
        await page.get_by_role("button", name="Continue").click()
        more = await server.engine.stream()
        assert server.services.model.tokenizer.decode(more.submission.prompt).endswith("one, two")
        tokens(more, ", three")
        finish(more)
        await expect(page.locator(".content")).to_have_text("one, two, three")
        await idle(page)


async def test_the_whole_conversation_is_sent(open_page: Open) -> None:
    async with serving(FakeEngine(say("Aye"))) as server:
        page = await open_page(server)
        for text in ("first", "second"):
            await send(page, text)
            await idle(page)
        prompt = server.services.model.tokenizer.decode(server.engine.submissions[-1].prompt)
        assert prompt.index("first") < prompt.index("Aye") < prompt.index("second")
        await page.get_by_role("button", name="Try again").click()
        await expect(page.locator(".message")).to_have_count(4)
        await idle(page)
        assert server.engine.submissions[-1].prompt == server.engine.submissions[-2].prompt


async def test_thoughts_are_shown_apart_from_the_answer(open_page: Open) -> None:
    plain = tiny_model()
    thinks = ChatTemplate(plain.template.source + "{# marks its thoughts with <think> #}", plain.tokenizer)
    async with serving(FakeEngine(None), model=replace(plain, template=thinks)) as server:
        page = await open_page(server)
        await send(page, "Think")
        stream = await server.engine.stream()
        tokens(stream, "<think>hm, well")
        await expect(page.locator(".thinking[open]")).to_contain_text("hm, well")
        tokens(stream, "</think>Yes.")
        finish(stream)
        await expect(page.locator(".content")).to_have_text("Yes.")
        await expect(page.locator(".thinking")).not_to_have_attribute("open", "")
