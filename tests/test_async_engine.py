"""The step loop: streams, aborts in every state, failures, pauses, drain, and an event loop that stays free."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from minserve.request import FinishReason, Pool, RequestError
from minserve.status import State
from tests.engines import PROMPT, Records, submission
from tests.serving import idle, read, running


async def test_streams_of_many_submissions_get_what_they_would_get_alone() -> None:
    async with running() as serving:
        streams = [serving.submit(submission([i, *PROMPT], f"r{i}")) for i in range(6)]
        together = await asyncio.gather(*(read(s) for s in streams))
        alone = [await read(serving.submit(submission([i, *PROMPT], f"a{i}"))) for i in range(6)]
    for a, b in zip(together, alone, strict=True):
        assert [d.token_ids for d in a] == [d.token_ids for d in b]
        assert a[-1].finish is FinishReason.LENGTH
    assert all(len(s.outcomes) == 1 for s in streams)


async def test_a_slow_reader_loses_nothing_and_holds_nobody() -> None:
    async with running() as serving:
        slow = serving.submit(submission(PROMPT, "slow"))
        quick = await read(serving.submit(submission(PROMPT, "quick")))
        await asyncio.sleep(0.05)
        deltas = await read(slow)
    assert "".join(d.text for d in deltas) == "".join(d.text for d in quick)


# bug: 15
# bug: 16
# bug: 18
async def test_random_aborts_in_every_state_leave_nothing_behind() -> None:
    rng = random.Random(5)
    async with running(seconds=0.001, num_blocks=24, max_num_batched_tokens=6) as serving:

        async def client(i: int) -> None:
            for round_ in range(6):
                await asyncio.sleep(rng.random() * 0.02)
                prompt = PROMPT[: rng.randint(1, 12)] * rng.randint(1, 3)
                stream = serving.submit(submission(prompt, f"{i}.{round_}", n=rng.choice([1, 1, 3]), max_tokens=12))
                if rng.random() < 0.6:
                    await asyncio.sleep(rng.random() * 0.03)
                    stream.close()
                    stream.close()
                await read(stream)
                assert {o.finish for o in stream.outcomes} <= {
                    FinishReason.LENGTH,
                    FinishReason.STOP,
                    FinishReason.ABORT,
                }
                assert len(stream.outcomes) == stream.submission.n

        await asyncio.gather(*(client(i) for i in range(12)))
        idle(serving)


async def test_an_abort_while_the_last_step_runs_does_not_reach_a_later_submission_of_that_name() -> None:
    async with running(seconds=0.05) as serving:
        first = serving.submit(submission(PROMPT, "r", max_tokens=1))
        await asyncio.sleep(0.02)
        assert serving.abort("r")
        assert (await read(first))[-1].finish is FinishReason.LENGTH
        assert (await read(serving.submit(submission(PROMPT, "r"))))[-1].finish is FinishReason.LENGTH


async def test_a_failed_step_is_isolated_and_the_next_request_works() -> None:
    async with running(fail={1}) as serving:
        failed = await read(serving.submit(submission(PROMPT, "a")))
        assert failed[-1].error is not None
        assert failed[-1].error.code == "engine_error"
        assert serving.state is State.READY
        good = await read(serving.submit(submission(PROMPT, "b")))
        assert good[-1].finish is FinishReason.LENGTH


async def test_two_failures_in_a_row_stop_the_engine_and_nobody_hangs() -> None:
    async with running(fail={0, 1}, max_num_seqs=1) as serving:
        streams = [serving.submit(submission(PROMPT, f"r{i}")) for i in range(4)]
        ends = [(await read(s))[-1] for s in streams]
        assert all(end.error is not None for end in ends)
        assert serving.state is State.FAILED
        for _ in range(3):
            with pytest.raises(RequestError, match="twice in a row") as error:
                serving.submit(submission(PROMPT, "late"))
            assert (error.value.status, error.value.code) == (503, "engine_failed")
            assert len(error.traceback) == 3, "an error raised again and again keeps every caller's frames alive"


async def test_a_step_that_hangs_fails_the_engine_instead_of_the_clients_patience() -> None:
    async with running(seconds=0.6, step_timeout=0.2) as serving:
        (end,) = (await read(serving.submit(submission(PROMPT))))[-1:]
        assert end.error is not None
        assert end.error.code == "step_timeout"
        assert serving.state is State.FAILED


async def test_a_paused_pool_stands_still_and_goes_on_where_it_was() -> None:
    async with running(seconds=0.005) as serving:
        alone = await read(serving.submit(submission(PROMPT, "alone", max_tokens=40)))
        paused = False
        serving.pause(lambda: frozenset([Pool.BULK]) if paused else frozenset())
        bulk = serving.submit(submission(PROMPT, "bulk", pool=Pool.BULK, max_tokens=40))
        deltas = await anext(bulk)
        paused = True
        queued = serving.submit(submission([1, *PROMPT], "queued", pool=Pool.BULK))
        await read(serving.submit(submission(PROMPT, "other")))
        before = {live.id: (live.phase, live.output) for live in serving.requests()}
        await asyncio.sleep(0.1)
        assert {live.id: (live.phase, live.output) for live in serving.requests()} == before
        assert before["queued#0"] == ("queued", 0)
        assert 0 < before["bulk#0"][1] < 40
        paused = False
        deltas += await read(bulk)
        assert [i for d in deltas for i in d.token_ids] == [i for d in alone for i in d.token_ids]
        assert (await read(queued))[-1].finish is FinishReason.LENGTH


async def test_where_nothing_can_run_the_loop_plans_seldom_but_sees_a_submission_at_once() -> None:
    records = Records()
    async with running(observers=[records]) as serving:
        serving.pause(lambda: frozenset([Pool.BULK]))
        bulk = serving.submit(submission(PROMPT, "bulk", pool=Pool.BULK))
        await asyncio.sleep(0.2)
        assert 2 <= len(records.steps) <= 20
        waits = []
        for i in range(5):
            before = time.perf_counter()
            await anext(serving.submit(submission(PROMPT, f"r{i}", max_tokens=1)))
            waits.append(time.perf_counter() - before)
        assert min(waits) < 0.01
        bulk.close()


# bug: 63
async def test_drain_finishes_what_runs_and_refuses_the_rest() -> None:
    async with running(seconds=0.005) as serving:
        stream = serving.submit(submission(PROMPT, "a"))
        drain = asyncio.create_task(serving.drain(10))
        await asyncio.sleep(0.01)
        with pytest.raises(RequestError) as error:
            serving.submit(submission(PROMPT, "b"))
        assert error.value.code == "draining"
        assert (await read(stream))[-1].finish is FinishReason.LENGTH
        await drain


async def test_drain_ends_what_is_left_after_its_limit_with_an_error() -> None:
    async with running(seconds=0.01, max_num_seqs=1) as serving:
        streams = [serving.submit(submission(PROMPT, f"r{i}", max_tokens=100)) for i in range(3)]
        await asyncio.sleep(0.05)
        await serving.drain(0.05)
        for stream in streams:
            end = (await read(stream))[-1]
            assert end.error is not None
            assert (end.error.status, end.error.code) == (503, "shutting_down")


async def test_stop_without_drain_wakes_every_reader() -> None:
    async with running(seconds=0.01) as serving:
        stream = serving.submit(submission(PROMPT, max_tokens=100))
        reader = asyncio.create_task(read(stream))
        await asyncio.sleep(0.05)
        await serving.stop()
        assert (await reader)[-1].error is not None


async def test_the_event_loop_stays_free_while_a_step_runs() -> None:
    async with running(seconds=0.15) as serving:
        stream = serving.submit(submission(PROMPT, max_tokens=4))
        reader = asyncio.create_task(read(stream))
        late = 0.0
        while not reader.done():
            before = time.perf_counter()
            await asyncio.sleep(0.002)
            late = max(late, time.perf_counter() - before)
        assert late < 0.1
