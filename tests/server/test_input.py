"""The forms that prompts and messages may have, and which are refused."""

from __future__ import annotations

import pytest

from tests.server.fakes import CHAT, COMPLETION, Server
from tests.server.http import error


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
