"""Chat messages of every form, and what is said of those that have none."""

from __future__ import annotations

from typing import Any

import pytest

from minserve.request import RequestError
from tests.text import templates
from tests.text.chats import CALL, SYSTEM, USER, template, user


# bug: 69
@pytest.mark.parametrize("content", [None, "", [], "missing", [{"type": "text", "text": "a"}], "text"])
def test_every_form_of_content_is_accepted(content: Any) -> None:
    assistant = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    if content == "missing":
        del assistant["content"]
    chat = [user(content if content != "missing" else None), assistant, {"role": "tool", "content": content}]
    for source in (templates.CHATML, templates.THINKING, templates.WRITES_BOS):
        assert template(source).encode(chat)


def test_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "one\ntwo" in template(templates.CHATML).render([user(parts)])


def test_tool_call_arguments_reach_the_template_as_an_object() -> None:
    chat = [USER, {"role": "assistant", "tool_calls": [CALL]}]
    assert '<tool_call>add {"a": 1, "b": "é"}</tool_call>' in template(templates.THINKING).render(chat)
    broken = {"function": {"name": "add", "arguments": "{not json"}}
    text = template(templates.THINKING).render([USER, {"role": "assistant", "tool_calls": [broken]}])
    assert '<tool_call>add "{not json"</tool_call>' in text


@pytest.mark.parametrize("source", [templates.NO_SYSTEM, templates.SILENT])
def test_a_system_message_goes_into_the_first_user_message_where_it_has_no_place(source: str) -> None:
    assert "user\nBe brief\n\nHello" in template(source).render([SYSTEM, USER])
    assert "user\nBe brief" in template(source).render([SYSTEM])


def test_developer_is_system_and_function_is_tool_for_templates_that_do_not_know_them() -> None:
    chat = [{"role": "developer", "content": "Be brief"}, USER, {"role": "function", "content": "3"}]
    text = template(templates.CHATML).render(chat)
    assert text.startswith("<|im_start|>system\nBe brief<|im_end|>")
    assert "<|im_start|>tool\n3" in text
    knows = template(templates.CHATML + "{# developer #}")
    assert "<|im_start|>developer\nBe brief" in knows.render(chat)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "pirate", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([USER, {"content": "x"}], "messages[1].role"),
        ([user(7)], "messages[0].content"),
        ([user([{"type": "image_url", "image_url": {"url": "x"}}])], "messages[0].content[0]"),
        ([user([{"type": "text", "text": None}])], "messages[0].content[0]"),
        ([USER, {"role": "assistant", "tool_calls": [7]}], "messages[1].tool_calls"),
    ],
)
def test_messages_at_fault_are_named(messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        template(templates.CHATML).render(messages)
    assert (caught.value.status, caught.value.param) == (400, param)
