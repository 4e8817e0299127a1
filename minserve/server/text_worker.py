"""One thread for templates and tokenizers, with a queue per key that is short, or moves.

Owns the thread and the queues. Keys take turns, so a caller with many long prompts delays himself, not others; a job
whose caller left while it waited never runs. It must not know what a job does.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from minserve.request import RequestError

T = TypeVar("T")

_Job = tuple[float, Callable[[], Any], "asyncio.Future[Any]"]  # when it came, what to do, whom to tell


class TextWorker:
    """All methods belong to the event loop; only the jobs run on the thread.

    A queue of `max_queue` jobs is full once its first one has waited for `patience` seconds: a burst of short prompts
    is read in no time, and what few long ones take nobody knows before.
    """

    def __init__(self, max_queue: int = 64, patience: float = 1.0) -> None:
        self._max_queue = max_queue
        self._patience = patience
        self._clock = asyncio.get_running_loop().time
        self._queues: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._busy = False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="minserve-text")

    async def run(self, key: str, job: Callable[[], T]) -> T:
        """What `job` returns or raises. RequestError 503 if this key's queue is full, 400 for too deep input."""
        queue = self._queues.setdefault(key, deque())
        now = self._clock()
        if len(queue) >= self._max_queue and now - queue[0][0] >= self._patience:
            raise RequestError(
                "Too many prompts of this key wait to be read.", status=503, code="tokenizer_busy", retry_after=1
            )
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        queue.append((now, job, future))
        self._next()
        try:
            return await future
        except RecursionError:
            raise RequestError("The input is nested too deeply.", code="invalid_json") from None

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    def close(self) -> None:
        """Jobs that wait are cancelled; the one that runs is not waited for."""
        for queue in self._queues.values():
            for *_, future in queue:
                future.cancel()
        self._queues.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        while self._queues and not self._busy:
            key, queue = self._queues.popitem(last=False)
            _, job, future = queue.popleft()
            if queue:
                self._queues[key] = queue  # to the back of the round
            if not future.done():
                self._busy = True
                running = asyncio.get_running_loop().run_in_executor(self._executor, job)
                running.add_done_callback(partial(self._finished, future))

    def _finished(self, future: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
        self._busy = False
        if done.cancelled():
            future.cancel()
        elif future.done():
            done.exception()  # its caller left; mark the outcome as seen
        elif (error := done.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())
        self._next()
