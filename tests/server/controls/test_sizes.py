"""Controls 2 and 3: the most output of every call, and the most input, in stages."""

from __future__ import annotations

import openai
import pytest

from minserve.config import LimitsConfig
from tests.server.controls.caller import PRICES, calling
from tests.server.serving import MODEL, keyed


async def test_every_call_has_a_bound_on_its_output() -> None:
    limits = LimitsConfig(default_max_tokens=5, default_completion_tokens=3, max_tokens=8)
    async with calling(limits=limits) as caller:
        assert (await caller.chat("Hi", extra_body={"ignore_eos": True})).usage.completion_tokens == 5
        whole = await caller.client.completions.create(model=MODEL, prompt="Hi", extra_body={"ignore_eos": True})
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 3
        greedy = await caller.ask(tokens=10**6)
        assert (greedy.usage.completion_tokens, greedy.choices[0].finish_reason) == (8, "length")
        assert (await caller.ask(tokens=100, n=3)).usage.completion_tokens == 24
        assert [row.max_tokens for row in caller.server.rows] == [5, 3, 8, 24]
        assert [row.asked_max_tokens for row in caller.server.rows] == [None, None, 10**6, 300]


@pytest.mark.parametrize("stream", [False, True])
async def test_whoever_asks_for_more_output_than_there_may_be_is_told(stream: bool) -> None:
    async with calling(limits=LimitsConfig(max_tokens=8)) as caller:
        create = caller.client.completions.with_raw_response.create
        for tokens, told in ((100, "8"), (9, "8"), (8, None), (openai.omit, None)):
            reply = await create(model=MODEL, prompt="Hi", max_tokens=tokens, stream=stream)
            assert reply.headers.get("x-minserve-max-tokens") == told
            await reply.http_response.aread()


@pytest.mark.parametrize(
    ("characters", "status", "code"),
    [
        (3000, 413, "body_too_large"),
        (1000, 400, "input_too_long"),
        (200, 400, "too_many_input_tokens"),
        (90, 400, "call_too_expensive"),
        (40, 200, None),
    ],
)
@pytest.mark.parametrize("chat", [True, False])
async def test_input_is_bounded_in_bytes_characters_tokens_and_price(
    chat: bool, characters: int, status: int, code: str | None
) -> None:
    limits = LimitsConfig(max_body_bytes=2000, max_input_chars=500, max_input_tokens=150)
    key = keyed("secret", max_call_cost=0.0099)  # 99 tokens
    async with calling(key, limits=limits, prices=PRICES) as caller:
        text = "x" * characters
        call = caller.chat(text, max_tokens=2) if chat else caller.ask(text, tokens=10)
        if code is None:
            await call
        else:
            error = await caller.refused(call, status, code)
            assert "x-minserve-cost" not in error.response.headers
            assert error.response.headers.get("retry-after") is None


async def test_the_row_of_a_refused_call_says_who_asked_for_what() -> None:
    async with calling(limits=LimitsConfig(max_input_tokens=4)) as caller:
        with pytest.raises(openai.BadRequestError):
            await caller.client.completions.create(
                model=MODEL,
                prompt="one two three four five six",
                max_tokens=7,
                n=2,
                user="bob",
                extra_headers={"X-Feature": "fx", "X-Run-ID": "rr"},
            )
        row = caller.server.rows[-1]
    assert (row.code, row.feature, row.run, row.end_user) == ("too_many_input_tokens", "fx", "rr", "bob")
    assert (row.asked_prompt > 4, row.max_tokens, row.asked_max_tokens, row.cost) == (True, 14, 14, 0)
