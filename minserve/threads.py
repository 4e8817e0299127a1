"""From a thread to the event loop that waits for it.

Owns nothing. What nobody waits for any more, because the loop or the future has ended meanwhile, is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def call_threadsafe(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    """Call it on the loop, from a thread or a signal's handler."""
    with suppress(RuntimeError):  # closed
        loop.call_soon_threadsafe(function, *args)


def succeed(future: asyncio.Future[T], result: T) -> None:
    """On a thread: the future's loop hears of what came out."""
    call_threadsafe(future.get_loop(), _set, future, future.set_result, result)


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """On a thread: the future's loop hears of what went wrong."""
    call_threadsafe(future.get_loop(), _set, future, future.set_exception, error)


def _set(future: asyncio.Future[Any], setter: Callable[[Any], None], value: object) -> None:
    if not future.done():
        setter(value)
