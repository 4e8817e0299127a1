"""The chat page when an answer fails: why, when to try again, and where to enter a key."""

from __future__ import annotations

import re

from playwright.async_api import expect

from minserve.request import FinishReason, RequestError
from tests.server.browser.pages import IN_BROWSER, Open, begin, idle, send
from tests.server.fakes import FakeEngine, say
from tests.server.serving import MODEL, keyed, serving

pytestmark = IN_BROWSER


async def test_errors_are_readable_and_say_when_to_try_again(open_page: Open) -> None:
    async with serving(FakeEngine(say("Fine"))) as server:
        page = await open_page(server)
        server.engine.refusal = RequestError("256 requests wait already.", status=503, code="queue_full", retry_after=2)
        await send(page, "Hi")
        failure = page.get_by_role("alert")
        await expect(failure).to_contain_text("256 requests wait already.")
        await expect(failure).to_contain_text("queue_full, status 503")
        await expect(failure.get_by_role("button")).to_have_text(re.compile("Try again in [12] s"))
        await expect(failure.get_by_role("button")).to_be_disabled()
        server.engine.refusal = None
        await failure.get_by_role("button", name=re.compile("^Try again$")).click()
        await expect(page.locator(".content")).to_have_text("Fine")
        await expect(page.get_by_role("alert")).to_be_hidden()


async def test_a_question_that_is_refused_as_it_stands_can_be_edited(open_page: Open) -> None:
    async with serving(FakeEngine(say("Fine"))) as server:
        page = await open_page(server)
        await send(page, "first")
        await idle(page)
        await send(page, "much too long " * 50)
        await expect(page.get_by_role("alert")).to_contain_text("maximum context length")
        await page.locator("#input").fill("a draft")
        await page.get_by_role("button", name="Edit the message").click()
        await expect(page.locator("#input")).to_be_focused()
        await expect(page.locator("#input")).to_have_value(re.compile("^much too long .*\na draft$"))
        await expect(page.locator(".message")).to_have_count(2)
        await send(page, "short")
        await expect(page.locator(".content").last).to_have_text("Fine")
        prompt = server.services.model.tokenizer.decode(server.engine.submissions[-1].prompt)
        assert prompt.index("first") < prompt.index("short")
        assert "too long" not in prompt


async def test_a_failure_in_the_middle_keeps_what_came(open_page: Open) -> None:
    async with serving(FakeEngine(None)) as server:
        page = await open_page(server)
        stream = await begin(page, server, "Hi", "So far")
        stream.end(FinishReason.ERROR, RequestError("The engine failed.", status=500, code="engine_error"))
        await expect(page.get_by_role("alert")).to_contain_text("The engine failed.")
        await expect(page.locator(".content")).to_have_text("So far")


async def test_a_server_that_is_gone_is_said_so(open_page: Open) -> None:
    async with serving(FakeEngine(say("Hello"))) as server:
        page = await open_page(server)
        await expect(page.locator("#model")).to_have_text(MODEL)
        await server.site.close()
        await send(page, "Hi")
        await expect(page.get_by_role("alert")).to_contain_text("can't be reached")


async def test_a_key_is_asked_for_and_kept_for_this_tab_only(open_page: Open) -> None:
    async with serving(FakeEngine(say("Hello")), keys={"ann": keyed("secret")}) as server:
        page = await open_page(server)
        await expect(page.locator("#model")).to_have_text("an api key is needed")
        await send(page, "Hi")
        await page.get_by_role("button", name="Enter the API key").click()
        await expect(page.get_by_label("API key")).to_be_focused()
        await page.get_by_label("API key").fill("secret")
        await page.get_by_role("button", name="Done").click()
        await expect(page.locator("#model")).to_have_text(MODEL)
        await send(page, "Hi again")
        await expect(page.locator(".content").last).to_have_text("Hello")
        await page.reload()
        await expect(page.locator("#model")).to_have_text(MODEL)
        assert await page.evaluate("JSON.stringify(localStorage).includes('secret')") is False
