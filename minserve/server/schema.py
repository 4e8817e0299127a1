"""The request bodies that are understood, field by field.

Owns names and types. Ranges and meanings are checked in `sampling.py` and `messages.py`, decoding in `json_body.py`;
what is known and refused is in `unsupported.py`.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from minserve.config import PoolName
from minserve.economics.caps import ScopeKind

TokenIds = list[int]
Prompt = str | list[str | int | TokenIds]  # one text, texts, one list of token ids, lists of token ids


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What both generating endpoints take. None: the model's own default, else OpenAI's (see sampling.py)."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # wins over max_tokens
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0 and -1: off
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    allowed_token_ids: TokenIds | None = None  # supported, as vLLM's: nothing else is sampled
    banned_token_ids: TokenIds | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    include_metrics: bool = False  # ours: adds the `metrics` object
    priority: int = 0  # lower goes first, clamped by the key
    pool: PoolName | None = None  # ours: one of the key's pools
    cache_salt: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class TemplateFields(Protocol):
    """How messages become a prompt: fields that chat, /tokenize and the render route share."""

    add_generation_prompt: bool | None  # default: true, unless the final message is continued
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any] | None
    reasoning_effort: str | None


class ChatBody(GenerationBody, kw_only=True):
    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    include_reasoning: bool = True


class CompletionBody(GenerationBody, kw_only=True):
    prompt: Prompt | None = None
    echo: bool = False
    logprobs: int | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """vLLM's two forms (prompt, messages) and llama.cpp's (content)."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: TokenIds


class AbortBody(msgspec.Struct, kw_only=True):
    id: str


class ResetBody(msgspec.Struct, kw_only=True):
    """Whose counters; names as the ledger's columns have them."""

    scope: ScopeKind
    key: str = ""  # without keys there is only that of [local]
    user: str | None = None
    end_user: str | None = None
    token: str | None = None
    run: str | None = None
