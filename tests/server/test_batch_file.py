"""A batch: the two files, what becomes of each line, and a run that is stopped and goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from minserve.async_engine import GAVE_UP
from minserve.backend.base import BackendError
from minserve.config import AccountConfig, Config, DegradationConfig, LimitConfig, TimeoutsConfig
from minserve.request import FinishReason, RequestError, Submission
from minserve.server.batch_answers import Answers, EngineAnswers
from minserve.server.batch_file import Batch, Runner, Status, run
from minserve.server.batch_lines import BatchError, Line, Results, answered, faulty, read_lines, read_results, scan
from minserve.server.batch_server import server_answers
from tests.server.fakes import CHAT, COMPLETION, FakeEngine, FakeStream, Server, keyed, say, serving
from tests.server.real import real_server

WIDE = 1 << 20


def line(name: str, body: dict[str, Any] | None = None, **fields: Any) -> str:
    chat = body is not None and "messages" in body
    url = "/v1/chat/completions" if chat else "/v1/completions"
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body or COMPLETION} | fields)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def results_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_text(encoding="utf-8").splitlines()]


# -- the files


def test_a_wrong_line_says_why_and_the_others_are_read(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        "\ufeff" + line("a"),
        "",
        "not json",
        line("b", method="GET"),
        line("c", url="/v1/embeddings"),
        line(""),
        json.dumps({"custom_id": "d"}),
        line("e" * 4000),
        line("f"),
    )
    found = {each.number: each for each in read_lines(source, 2000)}
    assert sorted(found) == [1, 3, 4, 5, 6, 7, 8, 9]
    assert [n for n, each in found.items() if each.fault is None] == [1, 9]
    assert (found[1].key, found[3].key, found[4].key, found[6].key, found[7].key) == ("a", 3, "b", 6, "d")
    assert "method" in str(found[4].fault)
    assert "/v1/completions" in str(found[5].fault)
    assert "2000 bytes" in str(found[8].fault)


def test_two_lines_with_one_name_are_refused_before_anything_runs(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("a"), line("b"), line("a"))
    with pytest.raises(BatchError, match="lines 1 and 3 have the same custom_id 'a'"):
        scan(source, WIDE)


async def test_half_a_result_at_the_end_is_dropped_and_what_follows_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    results = Results(target)
    results.add(Line(1, "a"), answered(Line(1, "a"), "cmpl-1", 200, {}), failed=False)
    results.add(Line(2, None), faulty(Line(2, None, fault="no JSON")), failed=True)
    await results.close()
    whole = target.read_bytes()
    for torn in (b'{"id":"ba', whole[: len(whole) // 3]):
        target.write_bytes(whole + torn)
        results = Results(target)
        assert (results.done, results.failed) == ({"a", 2}, 1)
        results.add(Line(3, "c"), answered(Line(3, "c"), "cmpl-3", 429, {}), failed=True)
        await results.close()
        assert [r["custom_id"] for r in results_of(target)] == ["a", None, "c"]
        assert read_results(target).failed == 2


@pytest.mark.parametrize("content", ["notes\n", '{"id": "x"}\n', "notes", '{"id":"batch_req_1"}\n{"id":"batch_req_2'])
def test_a_file_that_holds_something_else_is_refused_and_left_as_it_is(tmp_path: Path, content: str) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text(content, encoding="utf-8")
    with pytest.raises(BatchError, match="line 1 is no result"):
        Results(target)
    assert target.read_text(encoding="utf-8") == content


def test_results_that_can_not_be_written_are_said_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", line("a"))
    lines: list[str] = []
    batch = Batch(source, tmp_path / "none" / "out.jsonl")
    assert run(Config(), batch, progress=lambda *_: None, say=lines.append) == Status.UNUSABLE
    assert "out.jsonl can't be written" in capsys.readouterr().err
    assert lines == ["1 lines, 0 of them done before"]


async def test_a_run_that_is_complete_says_how_many_lines_have_an_error(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("a"), line("b"), "no JSON")
    results = Results(tmp_path / "out.jsonl")
    results.add(Line(1, "a"), answered(Line(1, "a"), "cmpl-1", 200, {}), failed=False)
    results.add(Line(2, "b"), answered(Line(2, "b"), "cmpl-2", 400, {}), failed=True)
    results.add(Line(3, None), faulty(Line(3, None, fault="no JSON")), failed=True)
    await results.close()
    lines: list[str] = []
    batch = Batch(source, tmp_path / "out.jsonl")
    status = await asyncio.to_thread(run, Config(), batch, progress=lambda *_: None, say=lines.append)
    assert (status, lines[-1]) == (Status.FAILED, "All lines have a result, 2 of them an error.")


# -- a run


SAID: list[str] = []


async def submitted(engine: FakeEngine, count: int) -> None:
    """Wait until so many lines have been submitted, those that have ended counted too."""
    for _ in range(1000):
        if len(engine.submissions) == count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{len(engine.submissions)} lines were submitted")


BULK = AccountConfig(pools=("bulk",))


@pytest.fixture(params=["engine", "server"])
def way(request: pytest.FixtureRequest) -> str:
    """Who answers: the engine of this process, or a server."""
    return str(request.param)


@asynccontextmanager
async def running(
    way: str, server: Server, source: Path, target: Path, **batch: Any
) -> AsyncIterator[tuple[Runner, Results]]:
    """A run that may begin, and its results, which are on the disk when the block has ended."""
    asked = Batch(source, target, **batch)
    async with AsyncExitStack() as cleanup:
        results = Results(target)
        cleanup.push_async_callback(results.close)
        if way == "engine":
            answers: Answers = EngineAnswers(server.services, asked.api_key)
        else:
            found = await cleanup.enter_async_context(server_answers(server.url, asked.api_key, asyncio.Event()))
            assert found is not None
            answers = found
        yield Runner(server.services.config, asked, answers, results, scan(source, WIDE)), results


async def run_batch(
    way: str, server: Server, source: Path, target: Path, stop: asyncio.Event | None = None, **batch: Any
) -> Results:
    async with running(way, server, source, target, **batch) as (runner, results):
        await asyncio.wait_for(runner.run(stop or asyncio.Event(), lambda *_: None, SAID.append), 20)
        return results


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


# -- a server


async def test_a_server_that_drains_leaves_the_rest_for_another_run(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", *(line(f"r{i}") for i in range(9))), tmp_path / "out.jsonl"
    async with serving(local=BULK) as server, running("server", server, source, target) as (runner, results):
        server.engine.refusal = RequestError("Going.", status=503, code="draining", retry_after=5)
        await asyncio.wait_for(runner.run(asyncio.Event(), lambda *_: None, SAID.append), 5)
    assert (results.done, runner.fault) == (set(), None)


async def test_a_server_that_is_gone_or_is_another_ends_the_run_and_fails_no_line(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", line("a"), line("b")), tmp_path / "out.jsonl"
    async with serving(local=BULK) as server:
        with pytest.raises(BatchError, match=r"/nowhere: There is no such route\."):
            async with server_answers(server.url + "/nowhere", None, asyncio.Event()):
                pass
        async with server_answers(server.url + "/v1/", None, asyncio.Event()):
            pass
        async with running("server", server, source, target) as (runner, results):
            await server.site.close()
            await asyncio.wait_for(runner.run(asyncio.Event(), lambda *_: None, SAID.append), 5)
    assert "can't be reached" in str(runner.fault)
    assert not results.done
    with pytest.raises(BackendError, match="can't be reached"):
        async with server_answers(server.url, None, asyncio.Event()):
            pass


def test_a_server_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", line("a"))
    batch = Batch(source, tmp_path / "out.jsonl", url="http://127.0.0.1:1")
    assert run(Config(), batch, progress=lambda *_: None, say=SAID.append) == Status.FAILED
    assert "http://127.0.0.1:1 can't be reached" in capsys.readouterr().err


async def test_a_run_that_is_stopped_while_its_server_says_nothing_ends_at_once() -> None:
    asked, stop = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()  # until the client has gone
        writer.close()

    async def stop_when_asked() -> None:
        await asked.wait()
        stop.set()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server, asyncio.timeout(5):
        stopping = asyncio.create_task(stop_when_asked())
        port = server.sockets[0].getsockname()[1]
        async with server_answers(f"http://127.0.0.1:{port}", None, stop) as answers:
            assert answers is None
        await stopping


@pytest.mark.parametrize(("pool", "ends"), [(None, True), ("bulk", False)])
async def test_an_account_without_bulk_is_said_once_unless_the_line_asked_for_it(
    tmp_path: Path, pool: str | None, ends: bool
) -> None:
    source, target = write(tmp_path / "in.jsonl", line("a", COMPLETION | {"pool": pool})), tmp_path / "out.jsonl"
    async with serving() as server, running("server", server, source, target) as (runner, results):
        await asyncio.wait_for(runner.run(asyncio.Event(), lambda *_: None, SAID.append), 5)
    assert (runner.fault is not None, results.done) == (ends, set() if ends else {"a"})
    assert not ends or "`pools`" in str(runner.fault)


# -- the process


def minserve_batch(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "minserve", "batch", "in.jsonl", "out.jsonl", "--model", "dummy"]
    command += ["--backend", "numpy", "--num-blocks", "64", "--max-num-seqs", "4", *more]
    root = Path(__file__).parent.parent.parent
    environment = os.environ | {"MINSERVE_DATA": str(folder / "data"), "PYTHONPATH": str(root)}
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_a_run_that_is_terminated_goes_on_where_it_stopped(tmp_path: Path) -> None:
    body = COMPLETION | {"model": "dummy", "max_tokens": 50, "ignore_eos": True}
    source = write(tmp_path / "in.jsonl", *(line(f"r{i}", body) for i in range(120)))
    target = tmp_path / "out.jsonl"
    first = minserve_batch(tmp_path)
    try:
        until = time.monotonic() + 60
        while not (target.exists() and target.stat().st_size) and time.monotonic() < until and first.poll() is None:
            time.sleep(0.02)
        first.send_signal(signal.SIGTERM)
        _, errors = first.communicate(timeout=40)
    finally:
        first.kill()
    assert first.returncode == 3, errors
    before = results_of(target)
    assert 0 < len(before) < 120
    with target.open("ab") as file:
        file.write(b'{"id":"batch_req_12')  # what a kill -9 may leave
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in (source, target):
        path.rename(elsewhere / path.name)
    second = minserve_batch(elsewhere)
    _, errors = second.communicate(timeout=100)
    assert second.returncode == 0, errors
    after = results_of(elsewhere / "out.jsonl")
    assert after[: len(before)] == before
    assert sorted(each["custom_id"] for each in after) == sorted(f"r{i}" for i in range(120))
    assert {each["response"]["body"]["usage"]["completion_tokens"] for each in after} == {50}
