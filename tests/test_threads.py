"""From a thread to the loop: what nobody waits for any more disturbs nobody."""

from __future__ import annotations

import asyncio

import pytest

from minserve.threads import call_threadsafe, fail, succeed


async def test_what_came_out_on_a_thread_arrives() -> None:
    good, bad = asyncio.Future[int](), asyncio.Future[int]()
    await asyncio.gather(asyncio.to_thread(succeed, good, 5), asyncio.to_thread(fail, bad, ZeroDivisionError()))
    assert await good == 5
    with pytest.raises(ZeroDivisionError):
        await bad


async def test_a_future_that_was_cancelled_stays_so() -> None:
    futures = [asyncio.Future[int]() for _ in range(2)]
    for future in futures:
        future.cancel()
    await asyncio.gather(
        asyncio.to_thread(succeed, futures[0], 5), asyncio.to_thread(fail, futures[1], ZeroDivisionError())
    )
    await asyncio.sleep(0)
    assert all(future.cancelled() for future in futures)


def test_a_loop_that_is_closed_hears_nothing() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    said: list[str] = []
    call_threadsafe(loop, said.append, "late")
    assert said == []
