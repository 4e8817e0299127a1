"""A thin asynchronous skin around the engine: the step loop, one worker thread, and a stream per submission.

Owns the loop task, the worker and the streams. All state of engine and streams is touched on the event loop; the
worker sees one step at a time. What frees a submission: its reader's `close`, its deadline, a failed step, drain.
It must not know HTTP; the server touches nothing of the engine but this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from copy import copy

from minserve.batch import StepResult
from minserve.engine import Delivery, Engine, step_failed
from minserve.policy.admission import admit, queue_timeout
from minserve.queue_times import QueueTimes
from minserve.request import Pool, RequestError, Submission
from minserve.status import EngineStatus, LiveRequest, State
from minserve.step import Step
from minserve.stream import Stream
from minserve.worker import Worker

log = logging.getLogger("minserve.engine")

# Until the next plan where nothing can run: a pause lasts; else the next plan differs, since skips and blocks do.
_PAUSED_S, _WAITING_S = 0.02, 0.001
GAVE_UP = frozenset({"engine_failed", "step_timeout"})  # codes of errors after which no call will do better


class AsyncEngine:
    def __init__(self, engine: Engine, *, max_queue: dict[Pool, int], step_timeout: float = 30.0) -> None:
        self.engine = engine
        self.state = State.READY
        self.failure: RequestError | None = None
        self._step_timeout = step_timeout
        self._streams: dict[str, Stream] = {}
        self._inbox: list[tuple[str, RequestError | None]] = []
        self._stepping = False
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._worker = Worker(engine.run)
        self._steps = 0
        self._failures = 0
        self._last_step: float | None = None
        self._times = QueueTimes(engine.scheduler, max_queue)
        self._paused: Callable[[], frozenset[Pool]] = frozenset

    # -- what the server calls

    async def start(self) -> None:
        self._task = asyncio.create_task(self._loop(), name="minserve-steps")

    def submit(self, submission: Submission) -> Stream:
        """Queue a submission; RequestError as `submit_all`."""
        return self.submit_all([submission])[0]

    def submit_all(self, submissions: Sequence[Submission]) -> list[Stream]:
        """Queue what belongs to one call and one pool, all of it or nothing.

        The queue is judged once, so that a call which fills it alone still runs where nobody waits.
        RequestError 400 if one can never fit, 503 if the queue is full or nothing is accepted.
        """
        if self.failure is not None:
            raise copy(self.failure)  # an exception keeps the frames of everybody it was raised to
        if self.state is not State.READY:
            raise RequestError("The server is shutting down.", status=503, code="draining", retry_after=5)
        load = self._times.load(submissions[0].pool)
        for submission in submissions:
            refusal = admit(submission, self.engine.scheduler.limits, load)
            if refusal is not None:
                raise refusal.error()
        return [self._open(submission) for submission in submissions]

    def _open(self, submission: Submission) -> Stream:
        self.engine.submit(submission)
        stream = self._streams[submission.id] = Stream(submission, self.abort, self.engine.progress)
        self._idle.clear()
        self._wake.set()
        return stream

    def abort(self, submission_id: str, error: RequestError | None = None) -> bool:
        """End a submission; its stream gets the last deltas. False if there is no such one.

        While a step runs this waits in the inbox: requests and blocks change only between steps.
        """
        if submission_id not in self._streams:
            return False
        self._inbox.append((submission_id, error))
        if not self._stepping:
            self._empty_inbox()
        return True

    def status(self) -> EngineStatus:
        counts = self.engine.scheduler.counts()
        age = None if self._last_step is None else self.engine.clock() - self._last_step
        return EngineStatus(
            state=self.state,
            steps=self._steps,
            running=counts.running,
            waiting=counts.waiting,
            blocks_total=counts.blocks_total,
            blocks_free=counts.blocks_free,
            blocks_cached=counts.blocks_cached,
            streams=len(self._streams),
            step_age=age,
        )

    def wait(self, pool: Pool) -> float:
        """Seconds until a call of this pool that comes now would start."""
        return self._times.wait(pool)

    def pause(self, pools: Callable[[], frozenset[Pool]]) -> None:
        """Ask `pools` before every step which pools get nothing in it; they keep what the others don't need."""
        self._paused = pools

    def requests(self) -> list[LiveRequest]:
        """What runs and what waits, in order of arrival."""
        return [LiveRequest.of(request) for request in self.engine.scheduler.requests.values()]

    async def drain(self, timeout: float) -> None:
        """Refuse new work, let the rest finish for `timeout` seconds, then end what is left with an error."""
        if self.state is State.READY:
            self.state = State.DRAINING
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        gone = RequestError("The server is shutting down.", status=503, code="shutting_down")
        for submission_id in list(self._streams):
            self.abort(submission_id, gone)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self._step_timeout)

    async def stop(self) -> None:
        """End the loop and the worker, free the device. Idempotent."""
        if self.state is State.STOPPED:
            return
        self.state = State.STOPPED
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._worker.stop()
        stopped = await asyncio.to_thread(self._worker.join, self._step_timeout)
        self._deliver(self.engine.fail_all(RequestError("The server has stopped.", status=503, code="shutting_down")))
        if stopped:
            self.engine.runner.close()

    # -- the step loop

    async def _loop(self) -> None:
        try:
            while self.failure is None and self.state is not State.STOPPED:
                self._empty_inbox()
                if not self.engine.has_work:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                await self._step()
        except Exception:
            log.exception("the step loop failed")
            self._give_up("The engine has failed.")

    async def _step(self) -> None:
        self._expire()
        self.engine.paused = self._paused()
        step = self.engine.begin()
        if not step.plan.chunks:
            # Nothing can run now: deliver what the plan ended, then look again, or as soon as somebody submits.
            self._deliver(self.engine.complete(step, StepResult(())))
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _PAUSED_S if self.engine.paused else _WAITING_S)
            return
        self._stepping = True
        try:
            async with asyncio.timeout(self._step_timeout):
                result = await self._worker.submit(step)
        except TimeoutError:
            log.error("step %d took longer than %.0f s", step.plan.step, self._step_timeout)
            message = f"A step took longer than {self._step_timeout:g} s; the engine has stopped."
            self._give_up(message, "step_timeout")
            return
        except Exception as error:
            log.exception("step %d failed", step.plan.step, exc_info=error)
            self._failures += 1
            self._deliver(self.engine.fail(step, step_failed(error)))
            if self._failures >= 2:
                self._give_up("The engine failed twice in a row and has stopped.")
            return
        finally:
            self._stepping = False
        self._failures = 0
        self._deliver(self.engine.complete(step, result))
        self._finished(step)

    def _empty_inbox(self) -> None:
        inbox, self._inbox = self._inbox, []
        for submission_id, error in inbox:
            self._deliver(self.engine.abort(submission_id, error))

    def _finished(self, step: Step) -> None:
        self._steps += 1
        self._last_step = self.engine.clock()
        self._times.finished(step, self._last_step)

    def _give_up(self, message: str, code: str = "engine_failed") -> None:
        """Never healthy but dead: every stream gets the error, submit refuses, health reports it."""
        self.failure = RequestError(message, status=503, code=code)
        self.state = State.FAILED
        self._deliver(self.engine.fail_all(self.failure))

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            stream = self._streams[delivery.group]
            stream.deliver(delivery)
            if delivery.outcome is not None:
                self._times.ended(delivery.outcome)
            if stream.done:
                del self._streams[delivery.group]
        if not self._streams:
            self._idle.set()

    def _expire(self) -> None:
        """Queue-time ceilings and total deadlines, checked between steps."""
        now = self.engine.clock()
        late: list[str] = []
        for group, stream in list(self._streams.items()):
            queue, total = stream.submission.queue_deadline, stream.submission.deadline
            if total is not None and now >= total:
                error = RequestError("The request took longer than the server allows.", status=504, code="timeout")
                self._deliver(self.engine.abort(group, error))
            elif queue is not None and now >= queue and stream.progress.phase == "queued":
                late.append(group)
        waits = self._times.without(set(late)) if late else {}  # when to come back: none of these will be waiting
        for group in late:
            error = queue_timeout(waits[self._streams[group].submission.pool])
            self._deliver(self.engine.abort(group, error))
