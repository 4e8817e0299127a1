"""The worker thread: runs one step at a time, and tells the event loop when it is done.

Owns the thread and the step it is in. It must not know what a step is made of, nor touch any state of the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from minserve.batch import StepResult
from minserve.step import Step


class Worker:
    """One long-lived thread that runs steps. CuPy's device and stream, and the CPU team's leader, belong to it."""

    def __init__(self, run: Callable[[Step], StepResult]) -> None:
        self._run = run
        self._job: tuple[Step, asyncio.Future[StepResult]] | None = None
        self._wake = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work, name="minserve-worker", daemon=True)
        self._thread.start()

    def submit(self, step: Step) -> asyncio.Future[StepResult]:
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        self._job = (step, future)
        self._wake.release()
        return future

    def stop(self) -> None:
        """Let the thread end after the step it is in. Idempotent."""
        self._job = None
        self._wake.release()

    def join(self, timeout: float) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            self._wake.acquire()
            job = self._job
            if job is None:
                return
            step, future = job
            loop = future.get_loop()
            try:
                result = self._run(step)
            except BaseException as error:  # whatever it is, the loop must hear of it
                _call(loop, _set_exception, future, error)
            else:
                _call(loop, _set_result, future, result)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *args)


def _set_result(future: asyncio.Future[StepResult], result: StepResult) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[StepResult], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
