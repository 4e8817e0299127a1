"""A batch's run, by an engine or a server: what becomes of each line, and what is left for another run."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from minserve.async_engine import GAVE_UP
from minserve.config import AccountConfig, DegradationConfig, LimitConfig, TimeoutsConfig
from minserve.request import FinishReason, RequestError, Submission
from minserve.server.batch_lines import BatchError
from tests.server.batches import BULK, SAID, line, results_of, run_batch, running, submitted, write
from tests.server.fakes import FakeEngine, FakeStream, say
from tests.server.real import real_server
from tests.server.serving import CHAT, COMPLETION, keyed, serving


@pytest.fixture(params=["engine", "server"])
def way(request: pytest.FixtureRequest) -> str:
    """Who answers: the engine of this process, or a server."""
    return str(request.param)


async def test_a_disk_that_is_full_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    source = write(tmp_path / "in.jsonl", *(line(f"r{i}") for i in range(40)))
    async with serving() as server:
        monkeypatch.setattr(os, "fsync", full)
        results = await run_batch("engine", server, source, tmp_path / "out.jsonl", concurrency=1)
    assert results.failure is not None
    assert results.failure.errno == 28


async def test_a_result_says_what_was_cut_under_load(way: str, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    source = write(tmp_path / "in.jsonl", line("long"), line("short", COMPLETION | {"max_tokens": 2}))
    degradation = DegradationConfig(enabled=True, shrink_to=3)
    async with serving(degradation=degradation, local=AccountConfig(allow_shrink=True, pools=("bulk",))) as server:
        server.engine.seconds = 0.6 * server.services.config.pools.interactive.queue_timeout_s
        await run_batch(way, server, source, target)
    found = {result["custom_id"]: result["response"] for result in results_of(target)}
    assert (found["long"]["degraded"], found["long"]["body"]["usage"]["completion_tokens"]) == ("shrink", 3)
    assert "degraded" not in found["short"]


async def test_every_line_gets_one_result_in_openais_form(way: str, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    source = write(
        tmp_path / "in.jsonl",
        line("chat", CHAT),
        line("text"),
        "broken",
        line("stream", COMPLETION | {"stream": True}),
        line("range", COMPLETION | {"temperature": 9}),
        line("other", COMPLETION | {"model": "gpt-4o"}),
    )
    async with serving(local=BULK) as server:
        results = await run_batch(way, server, source, target)
        rows = {row.id: row for row in server.rows}
    found = {each["custom_id"]: each for each in results_of(target)}
    assert (len(found), results.failed) == (6, 4)
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello"
    assert found["text"]["response"]["body"]["object"] == "text_completion"
    statuses = {"chat": 200, "text": 200, "stream": 400, "range": 400, "other": 404}
    assert {name: each["response"]["status_code"] for name, each in found.items() if name} == statuses
    assert found["range"]["response"]["body"]["error"]["param"] == "temperature"
    assert all(each["error"] is None for name, each in found.items() if name)
    assert found[None]["error"]["line"] == 3
    row = rows[found["text"]["response"]["request_id"]]
    assert (row.pool, row.finish, row.completion_tokens) == ("bulk", "stop", 5)
    assert {row.status for row in rows.values()} == {200, 400, 404}
    assert {row.pool for row in rows.values()} == {"bulk"}


async def test_no_more_lines_run_at_once_than_allowed(way: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *(line(f"r{i}") for i in range(10)))
    async with serving(FakeEngine(None), local=BULK) as server:
        run = asyncio.create_task(run_batch(way, server, source, tmp_path / "out.jsonl", concurrency=3))
        for count in (3, 6, 9, 10):
            await submitted(server.engine, count)
            assert len(server.engine.streams) == (3 if count < 10 else 1)
            for stream in server.engine.streams.values():
                stream.push(*say("Hi")(stream.submission)[-1])
        assert len((await run).done) == 10


async def test_a_full_queue_is_waited_for_and_an_exhausted_budget_waits_for_another_run(
    way: str, tmp_path: Path
) -> None:
    class Busy(FakeEngine):
        def submit(self, submission: Submission) -> FakeStream:
            self.refusal = (
                RequestError("full", status=503, code="queue_full", retry_after=0.01) if self.refusal is None else None
            )
            return super().submit(submission)

    source = write(tmp_path / "in.jsonl", line("a"), line("b"), line("c", COMPLETION | {"max_tokens": 500}))
    local = AccountConfig(pools=("bulk",), limits=(LimitConfig(period="day", tokens=100),))
    async with serving(Busy(), local=local) as server:
        await run_batch(way, server, source, tmp_path / "out.jsonl", concurrency=1)
    found = {each["custom_id"]: each["response"] for each in results_of(tmp_path / "out.jsonl")}
    assert {name: each["status_code"] for name, each in found.items()} == {"a": 200, "b": 200}
    async with serving(FakeEngine(), local=BULK) as server:  # a larger budget: the line is run now
        await run_batch(way, server, source, tmp_path / "out.jsonl")
    found = {each["custom_id"]: each["response"] for each in results_of(tmp_path / "out.jsonl")}
    assert {name: each["status_code"] for name, each in found.items()} == {"a": 200, "b": 200, "c": 200}


async def test_a_line_larger_than_the_queue_is_answered(way: str, tmp_path: Path) -> None:
    body = COMPLETION | {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 2, "ignore_eos": True}
    source = write(tmp_path / "in.jsonl", line("a", body), line("b", body))
    async with real_server(max_queue=4, local=BULK) as (server, _):
        results = await run_batch(way, server, source, tmp_path / "out.jsonl")
    assert (results.done, results.failed) == ({"a", "b"}, 0)


async def test_a_key_pays_where_keys_are_configured(way: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("a"))
    async with serving(keys={"ann": keyed("ms-1", pools=("bulk",))}) as server:
        with pytest.raises((RequestError, BatchError), match="API key"):
            await run_batch(way, server, source, tmp_path / "out.jsonl")
        await run_batch(way, server, source, tmp_path / "out.jsonl", api_key="ms-1")
        assert (server.rows[-1].key, server.rows[-1].pool) == ("ann", "bulk")


async def test_what_runs_too_long_after_a_stop_is_left_for_the_next_run(way: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *(line(f"r{i}") for i in range(8)))
    target, stop = tmp_path / "out.jsonl", asyncio.Event()
    timeouts = TimeoutsConfig(drain_s=0.5)
    async with serving(FakeEngine(None), local=BULK, timeouts=timeouts) as server:
        run = asyncio.create_task(run_batch(way, server, source, target, stop, concurrency=4))
        await submitted(server.engine, 4)
        first = next(iter(server.engine.streams.values()))
        first.push(*say("Hi")(first.submission)[-1])
        await submitted(server.engine, 5)  # the first is done, a fifth has taken its place
        stop.set()
        results = await run
        assert results.done == {"r0"}
        assert SAID[-1].startswith("Stopping: what runs has 0.4 s")
        await server.settled()  # a server has been told that nobody waits any more
    async with serving(local=BULK) as server:
        results = await run_batch(way, server, source, target)
    assert sorted(each["custom_id"] for each in results_of(target)) == [f"r{i}" for i in range(8)]
    assert not results.failed


@pytest.mark.parametrize("code", sorted(GAVE_UP))
async def test_a_line_that_fails_while_it_runs_has_an_error_and_a_dead_engine_ends_the_run(
    way: str, code: str, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", line("a"), line("b"))
    target = tmp_path / "out.jsonl"
    async with (
        serving(FakeEngine(None), local=BULK) as server,
        running(way, server, source, target, concurrency=1) as (runner, _),
    ):
        run = asyncio.create_task(runner.run(asyncio.Event(), lambda *_: None, SAID.append))
        (await server.engine.stream()).end(FinishReason.ERROR, RequestError("bad step", status=500, code="step_failed"))
        await submitted(server.engine, 2)
        (await server.engine.stream()).end(FinishReason.ERROR, RequestError("dead", status=503, code=code))
        await asyncio.wait_for(run, 5)
    assert [each["response"]["status_code"] for each in results_of(target)] == [500]
    assert str(runner.fault).endswith("dead")
