"""`minserve batch`: a file of requests into the bulk pool, of an engine of this process or of a server that runs.

Owns how many lines run at once, what is tried again, and how a run stops: a signal lets running lines finish for a
while, and what is not in the results file then is run next time, on whatever machine. It must not know who answers
(`batch_answers.py`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from enum import IntEnum
from http import HTTPStatus
from pathlib import Path
from typing import Any

from minserve.assemble import Say
from minserve.backend.base import BackendError
from minserve.config import Config
from minserve.observe.log import setup
from minserve.observe.output import Output
from minserve.request import RequestError
from minserve.server.batch_answers import Answers, engine_answers
from minserve.server.batch_lines import BatchError, Key, Line, read_lines, scan
from minserve.server.batch_results import Results, answered, faulty, read_results
from minserve.server.batch_server import server_answers
from minserve.server.serve import FAULTS
from minserve.server.signals import install_signals

_MAX_PAUSE_S = 60.0
_DRAIN_SHARE = 0.8  # of timeouts.drain_s; the rest is for settling and writing
_NOT_NOW = frozenset({"draining", "shutting_down"})

LineProgress = Callable[[int, int, int], None]  # lines done, failed among them, all lines


class Status(IntEnum):
    """A run's exit status; 2 is what a wrong command line ends with."""

    COMPLETE = 0
    FAILED = 1  # some line has an error, or the run could not go on
    UNUSABLE = 2
    STOPPED = 3  # by a signal, or for want of a budget; run it again to go on


@dataclass(frozen=True, slots=True)
class Batch:
    """source, target: input and results files. concurrency: lines that run at once. api_key: whose account pays.

    url: the server that answers; None: an engine of this process.
    """

    source: Path
    target: Path
    concurrency: int | None = None
    api_key: str | None = None
    url: str | None = None


def run(config: Config, batch: Batch, *, progress: LineProgress, say: Say) -> int:
    """Run every line that has no result yet; the process's exit status."""
    level = config.server.log_level
    level = "warning" if level == "info" else level  # a line per call would bury the progress
    with Output(sys.stdout, sys.stderr) as output:
        setup(config.server.log_format, level, output.errors)
        try:
            return asyncio.run(_run(config, batch, progress, say))
        except BatchError as error:
            reason, status = str(error), Status.UNUSABLE
        except RequestError as error:
            reason, status = error.message, Status.UNUSABLE
        except FAULTS as error:
            reason, status = str(error), Status.FAILED
        output.errors.write(f"minserve: {reason}\n")
        return status


async def _run(config: Config, batch: Batch, progress: LineProgress, say: Say) -> Status:
    for path in (batch.source, batch.target):
        if path.exists() and not path.is_file():
            raise BatchError(f"{path} is no regular file: what a batch reads, it reads again when it goes on")
    if batch.target.exists() and batch.source.exists() and batch.target.samefile(batch.source):
        raise BatchError(f"{batch.target} is the input file too; results need a file of their own")
    asked = scan(batch.source, config.limits.max_body_bytes)
    held = read_results(batch.target)
    say(f"{len(asked)} lines, {len(asked & held.done)} of them done before")
    if asked <= held.done:
        return _complete(held.failed, say)
    stop = asyncio.Event()
    install_signals(stop)
    async with AsyncExitStack() as cleanup:
        results = Results(batch.target)  # before anything is loaded: a file that can't be written is said at once
        cleanup.push_async_callback(results.close)
        answers = await cleanup.enter_async_context(_answers(config, batch, say, stop))
        if answers is None:
            return Status.STOPPED
        runner = Runner(config, batch, answers, results, asked)
        await runner.run(stop, progress, say)
    if (fault := runner.fault or results.failure) is not None:
        raise fault
    if missing := len(asked - results.done):
        say(f"Stopped: {missing} of {len(asked)} lines have no result. The same command goes on with these.")
        return Status.STOPPED
    return _complete(results.failed, say)


def _complete(failed: int, say: Say) -> Status:
    say(f"All lines have a result, {failed} of them an error.")
    return Status.FAILED if failed else Status.COMPLETE


def _answers(
    config: Config, batch: Batch, say: Say, stop: asyncio.Event
) -> AbstractAsyncContextManager[Answers | None]:
    if batch.url is None:
        return engine_answers(config, batch.api_key, say, stop)
    return server_answers(batch.url, batch.api_key, stop)


class Runner:
    """fault: why no line can be run any more, if that is so."""

    def __init__(self, config: Config, batch: Batch, answers: Answers, results: Results, asked: Set[Key]) -> None:
        self.fault: BackendError | None = None
        self._answers = answers
        self._patience = config.timeouts.drain_s * _DRAIN_SHARE
        self._results = results
        self._concurrency = batch.concurrency or 2 * config.engine.max_num_seqs
        self._lines = read_lines(batch.source, config.limits.max_body_bytes)
        self._total = len(asked)
        self._finished = len(asked & results.done)
        self._stop = asyncio.Event()
        self._progress: LineProgress = lambda *_: None
        self._say: Say = print
        self._unpaid_said = False

    async def run(self, stop: asyncio.Event, progress: LineProgress, say: Say) -> None:
        """Until every line has its result, or `stop` is set and what runs has ended."""
        self._stop, self._progress, self._say = stop, progress, say
        progress(self._finished, self._results.failed, self._total)
        lines = self._todo()
        working = asyncio.gather(*(self._work(lines) for _ in range(self._concurrency)))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not working.done():
            say(f"Stopping: what runs has {self._patience:g} s to end. Press Ctrl-C to exit at once.")
            await self._answers.end(self._patience)
        await working

    def _todo(self) -> Iterator[Line]:
        """Lines without a result, until the run stops or can't write."""
        for line in self._lines:
            if self._stop.is_set() or self._results.failure is not None:
                return
            if line.key not in self._results.done:
                yield line

    async def _work(self, lines: Iterator[Line]) -> None:
        for line in lines:
            if line.fault is not None:
                self._done(line, faulty(line), failed=True)
            elif (result := await self._answer(line)) is not None:
                self._done(line, result, failed=result["response"]["status_code"] != 200)

    def _done(self, line: Line, result: dict[str, Any], *, failed: bool) -> None:
        self._results.add(line, result, failed=failed)
        self._finished += 1
        self._progress(self._finished, self._results.failed, self._total)

    async def _answer(self, line: Line) -> dict[str, Any] | None:
        """The line's result; None if it has to wait for the next run."""
        while True:
            try:
                reply = await self._answers.answer(line)
            except BackendError as fault:
                self.fault = fault
                self._stop.set()
                return None
            error = reply.error
            if error is None:
                return answered(line, reply.id, reply.status, reply.body, reply.degraded)
            if error.code in _NOT_NOW:
                self._stop.set()
                return None
            if _worth_waiting(error):
                if await self._stopped_within(min(_MAX_PAUSE_S, error.retry_after or 0.0)):
                    return None
            elif error.status == HTTPStatus.TOO_MANY_REQUESTS:
                self._unpaid(line, error)
                return None
            else:
                return answered(line, reply.id, reply.status, reply.body)

    def _unpaid(self, line: Line, error: RequestError) -> None:
        """A budget is used up: the line waits for another run, when that is larger or new. Said once."""
        if not self._unpaid_said:
            self._unpaid_said = True
            self._say(f"Line {line.number} has to wait for another run, and perhaps more do: {error.message}")

    async def _stopped_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)
        return self._stop.is_set()


def _worth_waiting(error: RequestError) -> bool:
    """A full queue or a minute's cap passes; an exhausted budget does not."""
    return error.status in (429, 503) and error.retry_after is not None and error.should_retry is not False
