"""The chat page in use: settings, tabs, the keyboard, a narrow screen."""

from __future__ import annotations

from playwright.async_api import expect

from tests.server.browser.pages import IN_BROWSER, Open, idle, send
from tests.server.fakes import FakeEngine, say
from tests.server.serving import serving, tiny_model

pytestmark = IN_BROWSER


async def test_settings_reach_the_server_and_outlive_a_reload(open_page: Open) -> None:
    async with serving(FakeEngine(say("Aye"))) as server:
        page = await open_page(server)
        await page.get_by_role("button", name="Settings").click()
        await expect(page.get_by_label("System prompt")).to_be_focused()
        await page.get_by_label("System prompt").fill("Talk like a pirate")
        await page.get_by_label("Temperature").fill("0.3")
        await page.get_by_label("Longest answer").fill("77")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("dialog")).to_be_hidden()
        await page.reload()
        await send(page, "Hi")
        await expect(page.locator(".content")).to_have_text("Aye")
        submission = server.engine.submissions[-1]
        assert (submission.params.temperature, submission.params.max_tokens) == (0.3, 77)
        assert "Talk like a pirate" in server.services.model.tokenizer.decode(submission.prompt)


async def test_tabs_keep_their_own_conversations(open_page: Open) -> None:
    """One that is closed or reloaded takes nothing from another; a new one goes on with the latest."""
    async with serving(FakeEngine(say("Hello"))) as server:
        first = await open_page(server)
        second = await first.context.new_page()
        await second.goto(server.url)
        for page, text in ((first, "one"), (second, "two")):
            await send(page, text)
            await expect(page.locator(".content")).to_have_text("Hello")
            await idle(page)
        for page, text in ((first, "one"), (second, "two")):
            await page.reload()
            await expect(page.locator(".bubble")).to_have_text(text)
        await first.close()
        third = await second.context.new_page()
        await third.goto(server.url)
        await expect(third.locator(".bubble")).to_have_text("two")
        await third.get_by_role("button", name="New chat").click()
        await third.reload()
        await expect(third.locator("#welcome")).to_be_visible()
        await expect(third.locator(".message")).to_have_count(0)


async def test_a_long_answer_can_be_read_with_the_keyboard(open_page: Open) -> None:
    async with serving(FakeEngine(say("word\n\n" * 200))) as server:
        page = await open_page(server)
        await send(page, "Hi")
        await idle(page)
        await expect(page.locator(".message").first).not_to_be_in_viewport()
        await page.locator("#input").focus()
        for _ in range(3):  # past Try again and Copy
            await page.keyboard.press("Shift+Tab")
        await page.keyboard.press("Home")
        await expect(page.locator(".message").first).to_be_in_viewport()


async def test_the_end_of_an_answer_stays_in_sight_while_the_field_grows(open_page: Open) -> None:
    async with serving(FakeEngine(say("word\n\n" * 200))) as server:
        page = await open_page(server)
        await send(page, "Hi")
        await idle(page)
        last = page.get_by_role("button", name="Try again")
        await expect(last).to_be_in_viewport(ratio=1)
        await page.locator("#input").fill("line\n" * 8)
        await expect(last).to_be_in_viewport(ratio=1)
        await page.reload()
        await expect(page.locator("#context")).to_be_visible()
        await expect(last).to_be_in_viewport(ratio=1)
        await page.locator(".message").first.scroll_into_view_if_needed()
        await page.locator("#input").fill("line\n" * 8)
        await expect(page.locator(".message").first).to_be_in_viewport()


async def test_enter_sends_and_shift_enter_does_not(open_page: Open) -> None:
    async with serving(FakeEngine(say("Hello"))) as server:
        page = await open_page(server)
        await page.locator("#input").fill("one")
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("two")
        await expect(page.locator(".message")).to_have_count(0)
        await page.keyboard.press("Enter")
        await expect(page.locator(".bubble")).to_have_text("one\ntwo")
        await expect(page.locator("#announcer")).to_have_text("Answer: Hello")


async def test_nothing_overflows_on_a_narrow_screen(open_page: Open) -> None:
    answer = "A" * 300 + "\n\n```python\n" + "x = 1; " * 60 + "\n```\n\n" + "- item\n" * 40
    model = tiny_model(name="Mistral-7B-Instruct-v0.3-Q4_K_M.of-somebody")
    async with serving(FakeEngine(say(answer)), model=model) as server:
        page = await open_page(server, viewport={"width": 320, "height": 600}, is_mobile=True, has_touch=True)
        await expect(page.locator("#model")).to_have_text(model.name)
        await page.locator("#input").fill("B" * 300)
        await page.get_by_role("button", name="Send").tap()
        await expect(page.locator(".message")).to_have_count(2)
        await idle(page)
        assert await page.evaluate("document.documentElement.scrollWidth") <= 320
        box = await page.locator("#composer").bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 600
        await expect(page.get_by_role("link", name="Live")).to_be_visible()
        for name in ("Settings", "New chat"):
            await expect(page.get_by_role("button", name=name)).to_be_visible()
