"""The worker thread: runs one step at a time, and tells the event loop when it is done.

Owns the thread and the step it is in. It must not know what a step is made of, nor touch any state of the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from minserve.batch import StepResult
from minserve.step import Step
from minserve.threads import fail, succeed


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
            try:
                result = self._run(step)
            except Exception as error:
                fail(future, error)
            except BaseException as error:  # whatever it is, the loop must hear of it, and not end by it
                fail(future, RuntimeError(repr(error)))
            else:
                succeed(future, result)
