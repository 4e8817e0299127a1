"""A batch that a server answers: one that drains, is gone, is another, says nothing, or refuses the account."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from minserve.backend.base import BackendError
from minserve.config import Config
from minserve.request import RequestError
from minserve.server.batch_file import Batch, Status, run
from minserve.server.batch_lines import BatchError
from minserve.server.batch_server import server_answers
from tests.server.batches import BULK, SAID, line, running, write
from tests.server.serving import COMPLETION, serving


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
