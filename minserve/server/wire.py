"""The JSON that leaves: OpenAI's objects as structs, and how they become bytes.

Owns the names, the order and the presence of fields. UNSET fields are left out; None is written as null, because
clients tell `"finish_reason": null` from a missing one. It must not know where the values come from.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

Finish = Literal["stop", "length"]


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenEntry]
    refusal: None = None


class CompletionLogprobs(Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class PromptDetails(Struct):
    cached_tokens: int


class CompletionDetails(Struct):
    reasoning_tokens: int


class UsageBody(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    cost: float | UnsetType = UNSET  # ours, as OpenRouter spells it


class Metrics(Struct):
    """vLLM's names and meanings: the first token's time counts from the start of the prompt's first step."""

    queue_time_ms: float
    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None


class AssistantMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET


class Delta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Struct, kw_only=True):
    """Of a whole response and of a chunk: the completions endpoint has one form for both."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Response(Struct, kw_only=True):
    """A whole response, or one chunk of a stream: `usage` is UNSET, null or the totals."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: UsageBody | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


_encoder = msgspec.json.Encoder()


def to_json(value: object) -> bytes:
    """One line of JSON. U+0085, U+2028 and U+2029 are escaped: naive clients split lines at them."""
    data = _encoder.encode(value)
    if b"\xc2\x85" in data:
        data = data.replace(b"\xc2\x85", b"\\u0085")
    if b"\xe2\x80" in data:
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return data


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
