"""Thinking apart from the answer, where the model's template marks it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minserve.text.template import ChatTemplate
from tests.server.fakes import FakeEngine, say
from tests.server.serving import CHAT, Server, serving, tiny_model

THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if open %}<think>\n{% endif %}{% endif %}"
    "{# the model then writes <think> ... </think> #}"
)


async def answers(text: str, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """(message of the whole answer, deltas of the stream, usage)"""
    plain = tiny_model()
    model = tiny_model(template=ChatTemplate(THINKS, plain.tokenizer))
    async with serving(FakeEngine(say(text)), model=model) as server:
        status, whole = await server.post("/v1/chat/completions", {**CHAT, **fields})
        assert status == 200, whole
        deltas = await stream(server, fields)
    return whole["choices"][0]["message"], deltas, whole["usage"]


async def stream(server: Server, fields: dict[str, Any]) -> list[dict[str, Any]]:
    text = await server.events("/v1/chat/completions", {**CHAT, **fields})
    events = [e.removeprefix("data: ") for e in text.split("\n\n") if e.startswith("data: {")]
    return [choice["delta"] for event in events for choice in json.loads(event)["choices"]]


def joined(deltas: list[dict[str, Any]], field: str) -> str:
    return "".join(delta.get(field, "") for delta in deltas)


@pytest.mark.parametrize(
    ("text", "open_", "reasoning", "content"),
    [
        ("<think>Let me see.</think>Paris.", False, "Let me see.", "Paris."),
        ("Let me see.</think>\n\nParis.", True, "Let me see.", "Paris."),
        ("Paris.", False, "", "Paris."),
        ("<think>never done", False, "never done", ""),
        ("a < b and <th", False, "", "a < b and <th"),
    ],
)
async def test_thinking_has_its_own_field(text: str, open_: bool, reasoning: str, content: str) -> None:
    message, deltas, usage = await answers(text, chat_template_kwargs={"open": open_})
    assert (message.get("reasoning_content", ""), message["content"]) == (reasoning, content)
    assert (joined(deltas, "reasoning_content"), joined(deltas, "content")) == (reasoning, content)
    details = usage.get("completion_tokens_details", {"reasoning_tokens": 0})
    assert (details["reasoning_tokens"] > 0) is bool(reasoning)
    assert details["reasoning_tokens"] <= usage["completion_tokens"]


async def test_a_continued_thought_joins_what_the_prompt_has_of_it() -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "<think>\nWell, 2+2"}]
    message, deltas, _ = await answers(" is 4.</think>\n\nFour.", messages=messages, continue_final_message=True)
    assert (message["reasoning_content"], message["content"]) == (" is 4.", "Four.")
    assert joined(deltas, "reasoning_content") == " is 4."


async def test_thinking_can_be_left_out() -> None:
    message, deltas, usage = await answers("<think>Hm.</think>Paris.", include_reasoning=False)
    assert message == {"role": "assistant", "content": "Paris.", "refusal": None}
    assert joined(deltas, "content") == "Paris."
    assert all("reasoning_content" not in delta for delta in deltas)
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_models_that_know_no_thinking_keep_their_text() -> None:
    async with serving(FakeEngine(say("<think>x</think>y"))) as server:
        _, whole = await server.post("/v1/chat/completions", CHAT)
        assert whole["choices"][0]["message"]["content"] == "<think>x</think>y"
