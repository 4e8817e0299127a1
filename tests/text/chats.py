"""Messages and templates in a few characters."""

from __future__ import annotations

from typing import Any

from minserve.text.template import ChatTemplate
from minserve.text.tokenizer import Tokenizer
from tests.text.builders import byte_tokenizer

TOKENIZER = byte_tokenizer()
USER: dict[str, Any] = {"role": "user", "content": "Hello"}
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief"}
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def template(source: str | None, tokenizer: Tokenizer = TOKENIZER) -> ChatTemplate:
    return ChatTemplate(source, tokenizer)
