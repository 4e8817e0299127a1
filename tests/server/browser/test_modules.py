"""The page's modules that others may use too: Markdown, and the client with its events."""

from __future__ import annotations

import asyncio

from tests.server.browser.pages import IN_BROWSER, Open, tokens
from tests.server.fakes import FakeEngine
from tests.server.serving import serving

pytestmark = IN_BROWSER

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
