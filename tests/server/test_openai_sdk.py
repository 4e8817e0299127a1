"""The openai package, unchanged, against the real engine: what it sends is understood and what it gets it can read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from minserve.config import AccountConfig, LimitConfig, TimeoutsConfig
from minserve.request import FinishReason, TextDelta, Usage
from tests.server.fakes import FakeEngine
from tests.server.real import real_server
from tests.server.serving import MODEL, keyed, serving

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    async with real_server() as (server, _), openai_client(server.url) as client:
        yield client


def openai_client(url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url + "/v1", api_key=key, max_retries=0)


async def test_chat_streamed_and_whole_say_the_same(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = await client.chat.completions.create(**asked)
    stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(text) > 0
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert whole.usage is not None
    last = chunks[-1].usage
    assert last is not None
    assert (last.prompt_tokens, last.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert len({chunk.id for chunk in chunks}) == 1


async def test_the_stream_helper_takes_choices_that_come_in_any_order() -> None:
    engine = FakeEngine(None)
    async with serving(engine) as server, openai_client(server.url) as client:
        asked = client.chat.completions.stream(model=MODEL, messages=MESSAGES, n=2)
        async with asked as stream:
            answers = await engine.stream()
            for choice in (1, 0):
                answers.push(TextDelta(choice, f"choice {choice}"))
                answers.push(TextDelta(choice, finish=FinishReason.STOP, usage=Usage(2, 0, 1)))
            final = await stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["choice 0", "choice 1"]


async def test_completions_streamed_and_whole_say_the_same(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Once upon", "max_tokens": 24, "temperature": 0}
    whole = await client.completions.create(**asked)
    stream = await client.completions.create(**asked, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert all(chunk.usage is None for chunk in chunks)
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


async def test_the_synchronous_client_works_too() -> None:
    async with real_server() as (server, _):

        def talk() -> str | None:
            with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
                reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5, seed=1)
                return reply.choices[0].message.content

        assert await asyncio.to_thread(talk)


async def test_choices_seeds_and_logprobs(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "n": 3, "seed": 7, "logprobs": True}
    first = await client.chat.completions.create(**asked, top_logprobs=2, temperature=1.5)
    again = await client.chat.completions.create(**asked, top_logprobs=2, temperature=1.5)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) > 1  # each choice draws its own numbers
    for choice in first.choices:
        assert choice.logprobs is not None
        for entry in choice.logprobs.content or ():
            assert entry.logprob <= 0
            assert len(entry.top_logprobs) == 2
            assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    assert first.usage is not None
    assert first.usage.completion_tokens <= 24


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    models = [model.id async for model in client.models.list()]
    assert models == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_errors_become_the_sdks_own_classes(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model=MODEL, prompt="x" * 5000, stream=True)
    assert long.value.code == "context_length_exceeded"


async def test_keys_and_budgets_become_the_sdks_own_classes() -> None:
    keys = {"a": keyed("secret", limits=(LimitConfig(period="day", requests=1),))}
    async with serving(keys=keys) as server:
        async with openai_client(server.url, "wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(model=MODEL, prompt="Hi")
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="secret") as client:
            await client.completions.create(model=MODEL, prompt="Hi")
            with pytest.raises(openai.RateLimitError) as spent:
                await client.completions.create(model=MODEL, prompt="Hi")
            assert spent.value.code == "budget_exceeded"
        # x-should-retry: false kept the client from asking again by itself.
        assert [row.status for row in server.rows] == [401, 200, 429]


# bug: 50
async def test_an_error_in_a_stream_is_raised_by_the_sdk() -> None:
    timeouts = TimeoutsConfig(first_token_s=0.1, sse_keep_alive_s=0.05)
    async with serving(FakeEngine(None), timeouts=timeouts) as server, openai_client(server.url) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "first_token_timeout"


async def test_fields_of_other_servers_pass_through_extra_body() -> None:
    local = AccountConfig(user="me")
    async with real_server(local=local) as (server, assembly), openai_client(server.url) as client:
        reply = await client.completions.create(
            model=MODEL,
            prompt="Hi",
            max_tokens=6,
            extra_body={"top_k": 5, "min_p": 0.05, "ignore_eos": True, "min_tokens": 6, "return_token_ids": True},
        )
        choice = reply.choices[0]
        assert choice.finish_reason == "length"
        assert choice.model_extra is not None
        assert len(choice.model_extra["token_ids"]) == 6
        assert choice.model_extra["prompt_token_ids"] == list(assembly.tokenizer.encode("Hi"))
