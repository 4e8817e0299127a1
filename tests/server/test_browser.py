"""The built-in pages in headless Chromium, against the real server with a scripted engine, and once a real one."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

from minserve.async_engine import AsyncEngine
from minserve.config import PoolConfig, PoolsConfig
from minserve.engine import Progress
from minserve.request import FinishReason, Pool, RequestError, TextDelta, Usage
from minserve.text.template import ChatTemplate
from tests.engines import tiny
from tests.server.fakes import CHAT, MODEL, FakeEngine, FakeStream, Server, keyed, say, serving, tiny_model

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="module"),  # one browser for all tests, so one loop
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt-get install chromium)"),
]

Open = Callable[..., Awaitable[Page]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
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


async def send(page: Page, text: str) -> None:
    await page.locator("#input").fill(text)
    await page.keyboard.press("Enter")


async def idle(page: Page) -> None:
    await expect(page.get_by_role("button", name="Send")).to_be_visible()


def tokens(stream: FakeStream, text: str) -> None:
    stream.push(TextDelta(0, text, tuple(text.encode())))


def finish(stream: FakeStream, reason: FinishReason = FinishReason.STOP, completion: int = 5) -> None:
    stream.push(TextDelta(0, finish=reason, usage=Usage(len(stream.submission.prompt), 0, completion)))


async def test_chats_shows_every_state_and_keeps_the_conversation(open_page: Open) -> None:
    async with serving(FakeEngine(None)) as server:
        page = await open_page(server)
        await expect(page.locator("#model")).to_have_text(MODEL)
        await send(page, "Hi <b>there</b>")
        stream = await server.engine.stream()
        state = page.locator(".state")
        stream.progress = Progress("queued", 0, 40, 2)
        await expect(state).to_have_text("Waiting, 2 ahead")
        stream.progress = Progress("prefill", 16, 40, 0)
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
        stream.progress = Progress("prefill", 16, 40, 0)
        await expect(page.locator(".state")).to_have_text("Reading the prompt, 16 of 40 tokens")
        tokens(stream, "Hello")
        await expect(page.locator(".content")).to_have_text("Hello")
        finish(stream)
        await idle(page)


@pytest.mark.parametrize("how", ["button", "escape", "reload", "new chat"])
async def test_stopping_an_answer_stops_the_work(open_page: Open, how: str) -> None:
    async with serving(FakeEngine(None)) as server:
        page = await open_page(server)
        await send(page, "Tell me everything")
        stream = await server.engine.stream()
        tokens(stream, "It began")
        await expect(page.locator(".content")).to_have_text("It began")
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
        await send(page, "Tell me everything")
        stream = await server.engine.stream()
        tokens(stream, "It began")
        await expect(page.locator(".content")).to_have_text("It began")
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


async def test_a_failure_in_the_middle_keeps_what_came(open_page: Open) -> None:
    async with serving(FakeEngine(None)) as server:
        page = await open_page(server)
        await send(page, "Hi")
        stream = await server.engine.stream()
        tokens(stream, "So far")
        await expect(page.locator(".content")).to_have_text("So far")
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


MARKDOWN = """\
# Title

A *word*, a **bold one**, `code <b>`, snake_case_name, 2 * 3 * 4 and [a link](https://example.org/a_b_c).
[evil](javascript:alert(1)) https://example.org/x.

1. one
   - nested
2. two

> quoted

```html
<script>alert(1)</script>
```

---
~~~
open
"""


async def test_markdown_is_rendered_and_markup_is_text(open_page: Open) -> None:
    async with serving(FakeEngine()) as server:
        page = await open_page(server)
        html = await page.evaluate(
            """async (text) => {
                const { renderInto } = await import("/static/markdown.js");
                const whole = document.createElement("div");
                renderInto(whole, text);
                const grown = document.createElement("div");
                for (let i = 0; i <= text.length; i++) renderInto(grown, text.slice(0, i));
                return [whole.innerHTML, grown.innerHTML];
            }""",
            MARKDOWN,
        )
        assert html[0] == html[1]
        assert "<h3>Title</h3>" in html[0]
        assert "<em>word</em>" in html[0]
        assert "<strong>bold one</strong>" in html[0]
        assert "<code>code &lt;b&gt;</code>, snake_case_name, 2 * 3 * 4 and" in html[0]
        assert 'href="https://example.org/a_b_c"' in html[0]
        assert 'href="https://example.org/x"' in html[0]
        assert "javascript:alert(1)" in html[0]
        assert 'href="javascript' not in html[0]
        assert "<ol><li>one<ul><li>nested</li></ul></li><li>two</li></ol>" in html[0]
        assert "<blockquote><p>quoted</p></blockquote>" in html[0]
        assert "&lt;script&gt;" in html[0]
        assert "<script>" not in html[0]
        assert "<hr>" in html[0]


EVENTS = """async (chunks) => {
    const { parseEvents } = await import("/static/client.js");
    const stream = new ReadableStream({
        start(controller) {
            for (const chunk of chunks) controller.enqueue(new Uint8Array(chunk));
            controller.close();
        },
    });
    const out = [];
    for await (const { comment, event, data } of parseEvents(stream)) out.push(comment ?? `${event}|${data}`);
    return out;
}"""


async def test_the_client_parses_any_stream_however_it_is_cut(open_page: Open) -> None:
    lines = (": keep-alive", "", "data: é日😀", "", "event: error", "data:a", "data:  b", "id: 7", "", "data: lost")
    async with serving(FakeEngine()) as server:
        page = await open_page(server)
        for newline in ("\n", "\r\n", "\r"):
            data = newline.join(lines).encode()
            for size in (1, 2, 3, 1000):
                chunks = [list(data[i : i + size]) for i in range(0, len(data), size)]
                assert await page.evaluate(EVENTS, chunks) == ["keep-alive", "message|é日😀", "error|a\n b"]


async def test_the_client_serves_other_pages_too(open_page: Open) -> None:
    """`for await` over events; leaving the loop closes the connection; a bad request is an ApiError."""
    async with serving(FakeEngine(None)) as server:
        page = await open_page(server)
        running = asyncio.ensure_future(
            page.evaluate(
                """async () => {
                    const { chat } = await import("/static/client.js");
                    const seen = [];
                    for await (const event of chat({ messages: [{ role: "user", content: "Hi" }], max_tokens: 9 })) {
                        seen.push(event.type);
                        if (event.type === "text") break;
                    }
                    return seen;
                }"""
            )
        )
        stream = await server.engine.stream()
        tokens(stream, "Hello")
        assert (await running)[-1] == "text"
        await server.settled()
        assert stream.closed
        error = await page.evaluate(
            """async () => {
                const { chat, ApiError } = await import("/static/client.js");
                try {
                    for await (const event of chat({ messages: [], model: "other" }));
                } catch (error) {
                    return [error instanceof ApiError, error.status, error.code];
                }
            }"""
        )
        assert error == [True, 404, "model_not_found"]


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
