"""The messages of a request as arguments of the chat template.

Owns the counts and the flags that go with messages. Roles, content parts and control tokens are `text`'s business: it
makes messages regular and refuses what a template can't show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from minserve.config import LimitsConfig
from minserve.request import RequestError
from minserve.server.schema import Message, TemplateFields
from minserve.text.messages import strings_in
from minserve.text.template import ChatTemplate

_MAX_DEPTH = 64  # of what a template may walk through
_OWN_FLAGS = {"add_generation_prompt", "continue_final"}  # fields of their own; the template guards the other names


@dataclass(frozen=True, slots=True)
class Conversation:
    """What ChatTemplate.render and .encode are called with."""

    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool
    continue_final: bool
    variables: dict[str, Any]

    def render(self, template: ChatTemplate) -> str:
        return template.render(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final=self.continue_final,
            **self.variables,
        )

    def encode(self, template: ChatTemplate) -> list[int]:
        return template.encode(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final=self.continue_final,
            **self.variables,
        )


def conversation(messages: Sequence[Message], fields: TemplateFields, limits: LimitsConfig) -> Conversation:
    """RequestError 400 for too many messages or characters, or flags that exclude each other."""
    if len(messages) > limits.max_messages:
        raise RequestError(f"`messages` may hold at most {limits.max_messages} messages.", param="messages")
    if fields.continue_final_message and fields.add_generation_prompt:
        raise RequestError(
            "`continue_final_message` and `add_generation_prompt` exclude each other.", param="continue_final_message"
        )
    variables = dict(fields.chat_template_kwargs or {})
    for name in _OWN_FLAGS & variables.keys():
        raise RequestError(f"`chat_template_kwargs` must not set {name}.", param=f"chat_template_kwargs.{name}")
    _check_depth(variables, "chat_template_kwargs")
    presented = tuple(_present(message) for message in messages)
    for place, message in enumerate(presented):
        _check_depth(message, f"messages[{place}]")
    if fields.reasoning_effort is not None:
        variables["reasoning_effort"] = fields.reasoning_effort
    said = sum(map(_characters, presented))
    check_characters(said, limits, "messages")
    check_characters(said + sum(map(len, strings_in(variables))), limits, "chat_template_kwargs")
    return Conversation(
        messages=presented,
        add_generation_prompt=not fields.continue_final_message and fields.add_generation_prompt is not False,
        continue_final=fields.continue_final_message,
        variables=variables,
    )


def _check_depth(value: Any, param: str) -> None:
    """Level by level: the input decides how many there are."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = [item for item in level if isinstance(item, dict | list)]
        level = [child for item in inner for child in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return
    raise RequestError(f"`{param}` is nested too deeply.", code="invalid_json", param=param)


def check_characters(count: int, limits: LimitsConfig, param: str) -> None:
    """The stage between bytes and tokens: cheap, and it bounds what the tokenizer is given."""
    if count > limits.max_input_chars:
        raise RequestError(
            f"`{param}` has {count} characters; this server accepts at most {limits.max_input_chars}.",
            code="input_too_long",
            param=param,
        )


def _characters(message: dict[str, Any]) -> int:
    """Of all that a template may print: names, thoughts and tool calls too."""
    content = message.get("content", "")
    texts = [part["text"] or "" for part in content] if isinstance(content, list) else [content]
    rest = [value for name, value in message.items() if name not in ("role", "content")]
    return sum(map(len, texts)) + sum(map(len, strings_in(rest)))


def _present(message: Message) -> dict[str, Any]:
    """The fields that were sent; content parts as plain objects."""
    fields = {name: value for name, value in msgspec.structs.asdict(message).items() if value is not None}
    if isinstance(message.content, list):
        fields["content"] = [msgspec.structs.asdict(part) for part in message.content]
    return fields
