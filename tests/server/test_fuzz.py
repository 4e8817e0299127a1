"""Bodies that nobody would send on purpose: every one is answered, none with 500, and the next call works."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from minserve.server.schema import ChatBody, CompletionBody
from minserve.server.unsupported import UNSUPPORTED
from tests.server.serving import CHAT, COMPLETION, serving

STRINGS = ["", "Hi", "\u0000", "\ud83d\ude00", "<|im_end|>", "user", "a" * 300, "1", "null", "\u2028"]
NUMBERS = [0, 1, -1, 2, 5, 260, 261, 2**31, 2**63, -(2**64), 10**40, 0.0, -0.0, 0.5, 1.0, 1e-9, 1e308, 3.0]


def value(r: random.Random, depth: int = 0) -> Any:
    kinds = 8 if depth < 4 else 5
    match r.randrange(kinds):
        case 0:
            return None
        case 1:
            return r.random() < 0.5
        case 2 | 3:
            return r.choice(NUMBERS)
        case 4:
            return r.choice(STRINGS)
        case 5:
            return [value(r, depth + 1) for _ in range(r.randrange(4))]
        case 6:
            return [r.randrange(-2, 270) for _ in range(r.randrange(5))]
        case _:
            keys = [*STRINGS, "role", "content", "type", "text", "include_usage", "function", "arguments", "5"]
            return {r.choice(keys): value(r, depth + 1) for _ in range(r.randrange(4))}


def body(r: random.Random, base: dict[str, Any], fields: list[str]) -> dict[str, Any]:
    changed = dict(base)
    for name in r.sample(fields, r.choice((1, 1, 2, 4))):
        changed[name] = value(r)
    return changed


@pytest.mark.parametrize("seed", range(4))
async def test_random_bodies_never_break_anything(seed: int) -> None:
    r = random.Random(seed)
    async with serving() as server:
        for path, base, struct in (
            ("/v1/chat/completions", CHAT, ChatBody),
            ("/v1/completions", COMPLETION, CompletionBody),
        ):
            fields = [*struct.__struct_fields__, *UNSUPPORTED, "unknown"]
            for _ in range(150):
                sent = body(r, base, fields)
                async with server.session.post(server.url + path, json=sent) as response:
                    text = await response.text()
                    assert response.status in (200, 400, 403, 404), (response.status, sent, text)
                    if response.content_type == "text/event-stream":
                        assert text.endswith("data: [DONE]\n\n")
                    elif response.status != 200:
                        assert json.loads(text)["error"]["code"]
            assert (await server.post(path, base))[0] == 200
        assert not server.engine.streams


@pytest.mark.parametrize("seed", range(4))
async def test_damaged_json_never_breaks_anything(seed: int) -> None:
    r = random.Random(seed)
    whole = json.dumps({**CHAT, "logit_bias": {"5": 1.5}, "stop": ["\u2028", "é"]}, ensure_ascii=False).encode()
    async with serving() as server:
        for _ in range(150):
            data = bytearray(whole)
            for _ in range(r.choice((1, 1, 2, 5))):
                at = r.randrange(len(data))
                match r.randrange(3):
                    case 0:
                        data[at] = r.randrange(256)
                    case 1:
                        del data[at : at + r.randrange(1, 9)]
                    case _:
                        data[at:at] = r.choice((b"[" * 2000, b"NaN", b"\xed\xa0\xbd", b'"', b"\\ud800", b"1e999"))
            status, _ = await server.post("/v1/chat/completions", bytes(data))
            assert status in (200, 400, 404)
        assert (await server.post("/v1/chat/completions", CHAT))[0] == 200
