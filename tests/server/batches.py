"""Batch files, and runs of them with the engine of this process or with a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from minserve.config import AccountConfig
from minserve.server.batch_answers import Answers, EngineAnswers
from minserve.server.batch_file import Batch, Runner
from minserve.server.batch_lines import scan
from minserve.server.batch_results import Results
from minserve.server.batch_server import server_answers
from tests.server.fakes import FakeEngine
from tests.server.serving import COMPLETION, Server

WIDE = 1 << 20
BULK = AccountConfig(pools=("bulk",))
SAID: list[str] = []  # by all runs


def line(name: str, body: dict[str, Any] | None = None, **fields: Any) -> str:
    chat = body is not None and "messages" in body
    url = "/v1/chat/completions" if chat else "/v1/completions"
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body or COMPLETION} | fields)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def results_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_text(encoding="utf-8").splitlines()]


async def submitted(engine: FakeEngine, count: int) -> None:
    """Wait until so many lines have been submitted, those that have ended counted too."""
    for _ in range(1000):
        if len(engine.submissions) == count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{len(engine.submissions)} lines were submitted")


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
