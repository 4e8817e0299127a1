"""Who is let into the queue of the step loop, when the others should come back, and how long it may stay there."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from minserve.request import FinishReason, Pool, RequestError, Submission
from tests.engines import PROMPT, submission
from tests.serving import idle, read, running


async def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    async with running(seconds=0.02, max_queue=2, max_num_seqs=1) as serving:
        streams = [serving.submit(submission(PROMPT, "r0"))]
        await asyncio.sleep(0.1)
        streams += [serving.submit(submission(PROMPT, f"r{i}")) for i in (1, 2)]
        with pytest.raises(RequestError) as error:
            serving.submit(submission(PROMPT, "r3"))
        assert (error.value.status, error.value.code) == (503, "queue_full")
        assert error.value.retry_after is not None
        serving.submit(submission(PROMPT, "bulk", pool=Pool.BULK)).close()  # the other pool has its own queue
        await asyncio.gather(*(read(s) for s in streams))


async def test_a_call_larger_than_the_queue_runs_where_nobody_waits_and_else_is_refused_whole() -> None:
    async with running(max_queue=2, max_num_seqs=1) as serving:
        call = [submission(PROMPT, f"r{i}", n=2, max_tokens=4) for i in range(4)]
        streams = serving.submit_all(call)
        with pytest.raises(RequestError) as error:
            serving.submit_all([submission(PROMPT, f"late{i}") for i in range(2)])
        assert (error.value.status, error.value.code) == (503, "queue_full")
        assert sum(serving.status().waiting.values()) == 8
        for stream in streams:
            assert {delta.finish for delta in await read(stream)} >= {FinishReason.LENGTH}
        assert len(await read(serving.submit(submission(PROMPT, "after")))) > 0


async def test_a_call_of_which_one_prompt_can_never_fit_is_refused_whole() -> None:
    async with running(num_blocks=8, block_size=4) as serving:
        with pytest.raises(RequestError) as error:
            serving.submit_all([submission(PROMPT, "fits"), submission([1] * 32, "never")])
        assert error.value.code == "context_length_exceeded"
        idle(serving)


# bug: 59
@pytest.mark.parametrize("idle", [0.0, 1.0])
async def test_the_time_to_come_back_is_right_within_a_factor_of_two(idle: float) -> None:
    """idle: time without work before, which must not count as slow."""
    async with running(seconds=0.02, max_queue=5, max_num_seqs=2) as serving:
        await read(serving.submit(submission(PROMPT, "first", max_tokens=10)))
        await asyncio.sleep(idle)
        streams = [serving.submit(submission(PROMPT, f"r{i}", max_tokens=40)) for i in range(5)]
        await asyncio.sleep(0.2)
        streams += [serving.submit(submission(PROMPT, f"r{i}", max_tokens=40)) for i in (5, 6)]
        with pytest.raises(RequestError) as error:
            serving.submit(submission(PROMPT, "late"))
        refused = time.monotonic()
        await anext(streams[-1])
        following = serving.submit(submission(PROMPT, "following", max_tokens=1))
        await read(following)
        true = time.monotonic() - refused
        assert error.value.retry_after is not None
        assert true / 2 <= error.value.retry_after <= true * 2
        for stream in streams:
            stream.close()


# bug: 22
async def test_a_prompt_that_can_never_fit_is_refused_at_once() -> None:
    async with running(num_blocks=8, block_size=4) as serving:
        with pytest.raises(RequestError) as error:
            serving.submit(submission([1] * 32))
        assert error.value.code == "context_length_exceeded"
        deltas = await read(serving.submit(submission([1] * 31, max_tokens=50)))
        assert deltas[-1].finish is FinishReason.LENGTH


def expiring(id: str, queue: float | None = None, total: float | None = None) -> Submission:
    now = time.monotonic()
    return replace(
        submission(PROMPT, id, max_tokens=100),
        queue_deadline=None if queue is None else now + queue,
        deadline=None if total is None else now + total,
    )


async def test_ceilings_on_queue_time_and_total_time_hold() -> None:
    async with running(seconds=0.01, max_num_seqs=1) as serving:
        first = serving.submit(expiring("long", total=0.5))
        waiting = serving.submit(expiring("waits", queue=0.1))
        end = (await read(waiting))[-1]
        assert end.error is not None
        assert (end.error.status, end.error.code) == (503, "queue_timeout")
        assert end.error.retry_after is not None
        end = (await read(first))[-1]
        assert end.error is not None
        assert (end.error.status, end.error.code) == (504, "timeout")
        assert first.outcomes[0].usage.completion > 0
