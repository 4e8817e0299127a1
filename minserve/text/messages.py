"""Chat messages made regular before a template sees them.

Owns the roles, the forms of `content`, and what happens to a system message where a template has no place for one.
It must not know templates or tokens. RequestError's `param` names the message at fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from minserve.request import RequestError

Message = dict[str, Any]

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def regular(messages: Sequence[Mapping[str, Any]], *, developer: bool) -> list[Message]:
    """Copies in which role is known and content is a string. RequestError names the first message that can't be.

    developer: the template knows that role; otherwise it becomes system. The old `function` role becomes `tool`.
    """
    if not messages:
        raise RequestError("messages must not be empty.", param="messages")
    return [_regular(message, f"messages[{i}]", developer) for i, message in enumerate(messages)]


def _regular(message: Mapping[str, Any], where: str, developer: bool) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(sorted(ROLES))}.", param=f"{where}.role")
    if role == "function":
        role = "tool"
    elif role == "developer" and not developer:
        role = "system"
    out = {**message, "role": role, "content": _text(message.get("content"), f"{where}.content")}
    if out.get("tool_calls"):
        out["tool_calls"] = [_parsed_call(call, f"{where}.tool_calls") for call in out["tool_calls"]]
    return out


def _text(content: Any, where: str) -> str:
    """null and [] are empty; text parts are joined by newlines, as templates that want a string expect them."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"{where} must be a string, null or a list of parts.", param=where)
    texts = []
    for i, part in enumerate(content):
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind != "text" or not isinstance(text, str):
            raise RequestError(f"{where}[{i}]: only parts of type text are supported.", param=f"{where}[{i}]")
        texts.append(text)
    return "\n".join(texts)


def _parsed_call(call: Any, where: str) -> Message:
    """A tool call whose arguments are an object instead of JSON text, which is what templates iterate over."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise RequestError(f"{where} must be objects with a function.", param=where)
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"])
        except (ValueError, RecursionError):  # what a model once wrote need not be JSON
            arguments = None
        if isinstance(arguments, dict):
            function["arguments"] = arguments
    return {**call, "function": function}


def fold_system(messages: Sequence[Message]) -> list[Message]:
    """System messages put before the next user message, for templates without that role."""
    out: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(message["content"])
        elif message["role"] == "user" and waiting:
            out.append({**message, "content": "\n\n".join([*waiting, message["content"]])})
            waiting = []
        else:
            out.append(message)
    if waiting:
        out.append({"role": "user", "content": "\n\n".join(waiting)})
    return out


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """The same nested structure with every string in it changed; keys too, since templates print them."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(item, change) for item in value]
    return value


def strings_in(value: Any) -> Iterator[str]:
    """Every string of a nested structure, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from strings_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_in(item)
