"""One streamed request and what its client saw: the times of its events, its usage, its error.

Owns nothing. Tokens are counted by `usage`, not by chunks: a server may put several tokens into one event. Times are
`time.perf_counter` seconds of this process; how late the process itself ran is measured beside them (`Lag`).
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass(slots=True)
class RequestTrace:
    """What one request's client saw. `due` is when an open loop meant to send it."""

    due: float
    sent: float = 0.0
    done: float = 0.0
    times: list[float] = field(default_factory=list)  # of events that carried text
    prompt_tokens: int = 0
    completion_tokens: int = 0
    text: str = ""
    status: int = 0
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and bool(self.times)

    @property
    def ttft(self) -> float:
        """Seconds from when the request was due (open loop) or sent to its first text."""
        return self.times[0] - self.due

    @property
    def e2e(self) -> float:
        return self.done - self.due

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first, by usage."""
        if self.completion_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.completion_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what every body holds."""

    url: str
    chat: bool
    body: dict[str, Any]
    headers: dict[str, str]


async def send(session: aiohttp.ClientSession, target: Target, prompt: str, due: float | None = None) -> RequestTrace:
    """Send one request and read its stream to the end. Never raises for what the server does; see the trace's error."""
    body = dict(target.body, stream=True, stream_options={"include_usage": True})
    body |= {"messages": [{"role": "user", "content": prompt}]} if target.chat else {"prompt": prompt}
    now = time.perf_counter()
    trace = RequestTrace(due=now if due is None else due, sent=now)
    try:
        async with session.post(target.url, json=body, headers=target.headers) as response:
            trace.status = response.status
            if response.status != 200:
                trace.error = f"HTTP {response.status} {(await response.text())[:200]}"
            else:
                await _read(response, target.chat, trace)
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        trace.error = f"{type(error).__name__}: {error}"[:200]
    trace.done = time.perf_counter()
    return trace


async def _read(response: aiohttp.ClientResponse, chat: bool, trace: RequestTrace) -> None:
    async for raw in response.content:
        if not raw.startswith(b"data:"):
            continue
        data = raw[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if event.get("error"):
            trace.error = str(event["error"])[:200]
            return
        usage = event.get("usage")
        if usage:
            trace.prompt_tokens = usage.get("prompt_tokens", 0)
            trace.completion_tokens = usage.get("completion_tokens", 0)
        for choice in event.get("choices") or ():
            text = _text(choice.get("delta") or {}) if chat else choice.get("text")
            if text or choice.get("token_ids"):  # a token within a character has no text
                trace.times.append(time.perf_counter())
                trace.text += text or ""


def _text(delta: dict[str, Any]) -> str | None:
    """What a chunk of a chat adds, thinking too; vLLM has named that in two ways."""
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")


class Lag:
    """How late this process's event loop wakes up: numbers smaller than this are the client's, not the server's."""

    def __init__(self, interval: float = 0.02) -> None:
        self.samples: list[float] = []
        self._interval = interval
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Lag:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(self._interval)
            self.samples.append(time.perf_counter() - before - self._interval)
