"""The routes that generate nothing: models, tokenize, render, health, numbers, pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from minserve.status import State
from minserve.text.template import ChatTemplate
from minserve.text.tokenizer import Tokenizer
from minserve.weights.dummy import load_dummy
from minserve.weights.vocabulary import TokenizerJson
from tests.server.fakes import FakeEngine
from tests.server.serving import CHAT, COMPLETION, CONTEXT, MODEL, Server, serving, tiny_model


async def test_the_model_list_and_one_model(server: Server) -> None:
    _, listed = await server.get("/v1/models")
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", CONTEXT)
    assert await server.get(f"/v1/models/{MODEL}") == (200, card)


async def test_tokenize_takes_three_forms_and_detokenize_answers(server: Server) -> None:
    status, reply = await server.post("/tokenize", {"prompt": "Hé", "return_token_strs": True})
    assert status == 200
    assert (reply["tokens"], reply["count"], reply["max_model_len"]) == ([72, 195, 169], 3, CONTEXT)
    assert reply["token_strs"] == ["H", "�", "�"]
    assert (await server.post("/tokenize", {"content": "Hé"}))[1]["tokens"] == [72, 195, 169]
    _, chat = await server.post("/tokenize", {"messages": CHAT["messages"]})
    await server.post("/v1/chat/completions", CHAT)
    assert tuple(chat["tokens"]) == server.engine.submissions[-1].prompt
    assert (await server.post("/detokenize", {"tokens": [72, 195, 169]}))[1] == {"prompt": "Hé", "content": "Hé"}
    for bad in ({}, {"prompt": "a", "content": "b"}, {"prompt": 5}):
        assert (await server.post("/tokenize", bad))[0] == 400
    assert (await server.post("/detokenize", {"tokens": [-1]}))[0] == 400


# bug: 74
async def test_there_is_exactly_one_bos_however_a_prompt_is_made() -> None:
    source = load_dummy("dummy").tokenizer
    assert isinstance(source, TokenizerJson)
    tokenizer = Tokenizer.from_source(replace(source, add_bos=True))
    template = ChatTemplate("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", tokenizer)
    async with serving(model=tiny_model(tokenizer=tokenizer, template=template)) as server:
        bos = tokenizer.bos_id
        expected = [bos, 72, 105]
        assert (await server.post("/tokenize", {"prompt": "Hi"}))[1]["tokens"] == expected
        assert (await server.post("/tokenize", {"messages": CHAT["messages"]}))[1]["tokens"] == expected
        assert (await server.post("/tokenize", {"prompt": "Hi", "add_special_tokens": False}))[1]["tokens"] == [72, 105]
        await server.post("/v1/chat/completions", CHAT)
        for prompt in ("Hi", "<|endoftext|>Hi"):
            await server.post("/v1/completions", {"prompt": prompt})
        assert [list(submission.prompt) for submission in server.engine.submissions] == [expected] * 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"content": "a", "add_special": True}, "add_special"),
        ({"content": "<|im_end|>a", "parse_special": False}, "parse_special"),
        ({"content": "a", "with_pieces": True}, "with_pieces"),
        ({"prompt": "a", "tools": []}, "tools"),
    ],
)
async def test_what_tokenize_can_not_do_is_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    status, body = await server.post("/tokenize", fields)
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "unsupported_parameter", param)
    harmless = {"add_special": False, "parse_special": True, "with_pieces": False}
    assert (await server.post("/tokenize", {"content": "a"} | harmless))[0] == 200


NESTED: Any = []
for _ in range(900):
    NESTED = [NESTED]


@pytest.mark.parametrize("path", ["/v1/chat/completions/render", "/tokenize", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "another"}, 404, "model"),
        ({"tools": [{}]}, 400, "tools"),
        ({"chat_template": "{{ 1 }}"}, 400, "chat_template"),
        ({"chat_template_kwargs": {"deep": NESTED}}, 400, "chat_template_kwargs"),
    ],
)
async def test_who_only_looks_is_refused_what_who_generates_is(
    server: Server, path: str, fields: dict[str, Any], status: int, param: str
) -> None:
    got, reply = await server.post(path, CHAT | fields)
    assert (got, reply["error"]["param"]) == (status, param)


async def test_detokenize_knows_what_is_served(server: Server) -> None:
    assert (await server.post("/detokenize", {"model": "another", "tokens": [1]}))[0] == 404


async def test_render_shows_what_the_template_makes(server: Server) -> None:
    status, reply = await server.post("/v1/chat/completions/render", CHAT)
    assert status == 200
    assert reply["prompt"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert reply["count"] == len(reply["tokens"])
    assert not server.engine.submissions


async def test_health_and_ready_follow_the_engine(server: Server) -> None:
    for state, healthy, ready in (
        (State.READY, 200, 200),
        (State.DRAINING, 200, 503),
        (State.FAILED, 503, 503),
        (State.STOPPED, 503, 503),
    ):
        server.engine.state = state
        assert (await server.get("/health"))[0] == healthy
        assert (await server.get("/ready"))[0] == ready


# bug: 61
async def test_gauges_are_read_when_scraped() -> None:
    engine = FakeEngine(None)
    async with serving(engine) as server:
        body = {**COMPLETION, "stream": True}
        open_streams = [await server.session.post(server.url + "/v1/completions", json=body) for _ in range(20)]
        assert await running(server) == 20
        for response in open_streams:
            response.close()
        await server.settled()
        assert await running(server) == 0


async def running(server: Server) -> float:
    async with server.session.get(server.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    gauge = 'vllm:num_requests_running{model_name="tiny",pool="interactive"}'
    (line,) = [row for row in text.splitlines() if row.startswith(gauge)]
    return float(line.split()[-1])


async def test_status_says_what_is_going_on(server: Server) -> None:
    await server.post("/v1/completions", COMPLETION)
    status, reply = await server.get("/status?steps=10")
    assert status == 200
    assert (reply["model"], reply["state"], reply["calls"], reply["blocks_total"]) == (MODEL, "ready", 0, 100)
    assert reply["running"] == reply["waiting"] == {"interactive": 0, "bulk": 0}
    assert reply["numbers"]["pools"]["interactive"]["requests"] == 0
    assert reply["findings"]
    assert "requests" not in reply
    server.engine.script = None
    async with server.session.post(server.url + "/v1/completions", json={**COMPLETION, "stream": True}):
        _, reply = await server.get("/status?requests=1")
    assert [(live["phase"], live["blocks"]) for live in reply["requests"]] == [("decode", [5])]
    assert set((await server.get("/version"))[1]) == {"version"}


@pytest.mark.parametrize("steps", ["abc", "-1", "1.5", "10000", ""])
async def test_a_count_of_steps_that_is_none_is_refused_by_name(server: Server, steps: str) -> None:
    status, reply = await server.get(f"/status?steps={steps}")
    assert (status, reply["error"]["param"]) == (400, "steps")


async def test_the_page_is_served_with_its_files(server: Server) -> None:
    async with server.session.get(server.url + "/") as response:
        assert response.content_type == "text/html"
        assert "default-src 'self'" in response.headers["Content-Security-Policy"]
        tag = response.headers["ETag"]
    async with server.session.get(server.url + "/", headers={"If-None-Match": tag}) as response:
        assert response.status == 304
    async with server.session.get(server.url + "/static/client.js") as response:
        assert (response.status, response.content_type) == (200, "text/javascript")
