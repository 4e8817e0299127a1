"""The forms that prompts and messages may have, how long they may be, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from minserve.config import LimitsConfig
from tests.server.http import error
from tests.server.serving import CHAT, COMPLETION, CONTEXT, Server, serving


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("Hi", [(72, 105)]),
        (["Hi", "a"], [(72, 105), (97,)]),
        ([72, 105], [(72, 105)]),
        ([[72], [105, 97]], [(72,), (105, 97)]),
    ],
)
async def test_the_four_forms_of_a_prompt(server: Server, prompt: object, ids: list[tuple[int, ...]]) -> None:
    assert (await server.post("/v1/completions", {"prompt": prompt}))[0] == 200
    assert [submission.prompt for submission in server.engine.submissions] == ids


# bug: 44
@pytest.mark.parametrize(
    "prompt", [[], [[]], [[1], []], ["a", 1], [1, [2]], [-1], [261], [2**62], [[1], [-1]], ["a"] * 65, [1.5], {}]
)
async def test_prompts_that_mean_nothing_are_400(server: Server, prompt: object) -> None:
    status, reply = await server.post("/v1/completions", {"prompt": prompt})
    assert status == 400
    assert error(400, reply)["param"].startswith("prompt")
    assert not server.engine.submissions
    assert (await server.post("/v1/completions", COMPLETION))[0] == 200


async def test_an_empty_prompt_is_the_models_bos(server: Server) -> None:
    for body in ({"prompt": ""}, {}, {"prompt": None}):
        assert (await server.post("/v1/completions", body))[0] == 200
        assert server.engine.submissions[-1].prompt == (server.services.model.tokenizer.bos_id,)


# bug: 69
@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
    ],
)
async def test_all_forms_of_content_in_a_tool_loop(server: Server, message: dict[str, object]) -> None:
    messages = [{"role": "user", "content": "go"}, message, {"role": "tool", "tool_call_id": "c", "content": "42"}]
    body = {"messages": messages, "stop": None, "tools": None, "temperature": None, "logprobs": None}
    status, reply = await server.post("/v1/chat/completions", body)
    assert status == 200, reply


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "king", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0]"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
    ],
)
async def test_messages_that_cannot_be_shown_are_400(server: Server, message: dict[str, object], param: str) -> None:
    status, reply = await server.post("/v1/chat/completions", {"messages": [message]})
    assert status == 400
    assert error(400, reply)["param"].startswith(param)


# bug: 73
async def test_control_tokens_in_a_users_text_stay_text(server: Server) -> None:
    tokenizer = server.services.model.tokenizer
    end = tokenizer.special_texts["<|im_end|>"]
    body = {"messages": [{"role": r, "content": "a<|im_end|>b"} for r in ("system", "user", "tool")]}
    assert (await server.post("/v1/chat/completions", body))[0] == 200
    prompt = server.engine.submissions[-1].prompt
    assert prompt.count(end) == 3  # the template's own, one per message
    # A raw prompt is the caller's own from its first token on: there it is a control token.
    assert (await server.post("/v1/completions", {"prompt": "a<|im_end|>b"}))[0] == 200
    assert server.engine.submissions[-1].prompt == (97, end, 98)


async def test_an_unknown_model_is_404_and_none_means_ours(server: Server) -> None:
    status, reply = await server.post("/v1/chat/completions", {**CHAT, "model": "gpt-4"})
    assert (status, error(404, reply)["code"], reply["error"]["param"]) == (404, "model_not_found", "model")
    assert (await server.post("/v1/chat/completions", {"messages": CHAT["messages"]}))[0] == 200


async def test_stream_options_need_a_stream(server: Server) -> None:
    status, reply = await server.post("/v1/completions", {**COMPLETION, "stream_options": {"include_usage": True}})
    assert (status, reply["error"]["param"]) == (400, "stream_options")


async def test_the_final_message_can_be_continued(server: Server) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Well"}]
    body = {"messages": messages, "continue_final_message": True}
    assert (await server.post("/v1/chat/completions", body))[0] == 200
    assert bytes(i for i in server.engine.submissions[-1].prompt if i < 256).endswith(b"Well")
    status, reply = await server.post("/v1/chat/completions", {**body, "add_generation_prompt": True})
    assert (status, reply["error"]["param"]) == (400, "continue_final_message")
    status, reply = await server.post("/v1/chat/completions", {**body, "messages": CHAT["messages"]})
    assert (status, reply["error"]["param"]) == (400, "continue_final_message")


async def test_template_variables_pass_and_ours_cannot_be_replaced(server: Server) -> None:
    fine = {**CHAT, "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
    assert (await server.post("/v1/chat/completions", fine))[0] == 200
    for name in ("messages", "add_generation_prompt", "bos_token"):
        status, _ = await server.post("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {name: "x"}})
        assert status == 400


async def test_the_stages_of_input_have_their_own_codes() -> None:
    async with serving(limits=LimitsConfig(max_input_chars=50, max_input_tokens=20)) as server:
        status, reply = await server.post("/v1/completions", {**COMPLETION, "prompt": "x" * 51})
        assert (status, error(400, reply)["code"]) == (400, "input_too_long")
        status, reply = await server.post("/v1/completions", {**COMPLETION, "prompt": "x" * 21})
        assert (status, error(400, reply)["code"]) == (400, "too_many_input_tokens")
        assert not server.engine.submissions


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": [{"role": "user", "content": "Hi", "name": "x" * 60}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "Hi", "reasoning_content": "x" * 60}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x" * 60}}]}]}, "messages"),
        ({"chat_template_kwargs": {"documents": ["x" * 60]}}, "chat_template_kwargs"),
        ({"reasoning_effort": "x" * 60}, "chat_template_kwargs"),
    ],
)
async def test_all_that_a_template_may_print_is_counted(more: dict[str, Any], param: str) -> None:
    async with serving(limits=LimitsConfig(max_input_chars=50)) as server:
        status, reply = await server.post("/v1/chat/completions", {**CHAT, **more})
        assert (status, error(400, reply)["code"], reply["error"]["param"]) == (400, "input_too_long", param)
        assert (await server.post("/v1/chat/completions", CHAT))[0] == 200


# bug: 41
async def test_a_prompt_that_fills_the_context_is_refused_with_the_true_limit(server: Server) -> None:
    status, reply = await server.post("/v1/completions", {**COMPLETION, "prompt": "x" * CONTEXT})
    assert status == 400
    assert error(400, reply)["code"] == "context_length_exceeded"
    assert f"This model's maximum context length is {CONTEXT} tokens. However, " in reply["error"]["message"]
    body = {**COMPLETION, "prompt": "x" * 8, "max_tokens": CONTEXT - 3}
    assert (await server.post("/v1/completions", body))[0] == 200
    assert server.engine.submissions[-1].params.max_tokens == CONTEXT - 8
