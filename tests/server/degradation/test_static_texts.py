"""A feature's static text instead of the model: in each form of answer, counted as a request."""

from __future__ import annotations

import json

import pytest

from minserve.config import AccountConfig, LimitConfig
from minserve.text.template import ChatTemplate
from tests.server.degradation.ladder import FAQ, LADDER, POOLS, TEXT, count
from tests.server.serving import CHAT, COMPLETION, Server, serving, tiny_model
from tests.server.test_reasoning import THINKS


async def test_then_features_with_a_text_get_it_instead_of_the_model(server: Server) -> None:
    server.engine.waiting = 9
    body = {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 1}
    async with server.session.post(server.url + "/v1/chat/completions", json=body, headers=FAQ) as response:
        assert (response.status, response.headers["x-minserve-degraded"]) == (200, "static")
        reply = await response.json()
    assert [choice["message"]["content"] for choice in reply["choices"]] == [TEXT, TEXT]
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["stop", "stop"]
    assert reply["usage"]["total_tokens"] == 0
    assert not server.engine.submissions
    (row,) = server.rows
    assert (row.finish, row.status, row.degraded, row.cost, row.prompt_tokens) == ("static", 200, "static", 0, 0)
    assert row.feature == "faq"
    assert count(server, "static") == 1
    status, reply = await server.post("/v1/chat/completions", CHAT)  # another feature still gets the model
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "A lo")


async def test_a_static_text_counts_as_a_request() -> None:
    local = AccountConfig(limits=(LimitConfig(period="day", requests=1, tokens=5),))
    async with serving(degradation=LADDER, pools=POOLS, local=local) as server:
        server.engine.waiting = 9
        assert (await server.post("/v1/chat/completions", CHAT, headers=FAQ))[0] == 200
        status, reply = await server.post("/v1/chat/completions", CHAT, headers=FAQ)
        assert (status, reply["error"]["code"]) == (429, "budget_exceeded")
        assert [(row.finish, row.status) for row in server.rows] == [("static", 200), ("refused", 429)]


async def test_a_static_text_is_streamed_as_any_answer(server: Server) -> None:
    server.engine.waiting = 9
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    async with server.session.post(server.url + "/v1/chat/completions", json=body, headers=FAQ) as response:
        assert response.headers["x-minserve-degraded"] == "static"
        text = await response.text()
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data: ")]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == TEXT
    assert chunks[-1]["usage"]["total_tokens"] == 0
    assert [row.finish for row in server.rows] == ["static"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_static_text_echoes_no_prompt(server: Server, stream: bool) -> None:
    server.engine.waiting = 9
    body = {**COMPLETION, "prompt": ["a", "b"], "echo": True, "logprobs": 2, "max_tokens": 0, "stream": stream}
    async with server.session.post(server.url + "/v1/completions", json=body, headers=FAQ) as response:
        text = await response.text()
    assert text.count(TEXT) == 2
    assert '"text":"a' not in text


async def test_a_static_text_is_no_thinking() -> None:
    model = tiny_model(template=ChatTemplate(THINKS, tiny_model().tokenizer))
    async with serving(model=model, degradation=LADDER, pools=POOLS) as server:
        server.engine.waiting = 9
        body = {**CHAT, "chat_template_kwargs": {"open": True}}
        status, reply = await server.post("/v1/chat/completions", body, headers=FAQ)
        message = reply["choices"][0]["message"]
        assert (status, message["content"]) == (200, TEXT)
        assert "reasoning_content" not in message
