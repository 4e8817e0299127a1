"""The one way in: degrade, reserve, submit, read, settle. HTTP requests and the lines of a batch take it alike.

Owns the calls that run and the promise that every call ends in exactly one row: normal end, error, timeout, abort and a
client that left all pass through the exit of `Gateway.run`; what is refused before passes through `refusals`. It must
not know HTTP.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

from msgspec import structs

from minserve.config import PoolsConfig, TimeoutsConfig
from minserve.economics.accounting import Accounting
from minserve.economics.keys import Identity
from minserve.economics.reservation import Admission, Reservation
from minserve.request import RequestError, Submission
from minserve.server.arrival import Arrival, Call, Known
from minserve.server.degradation import Degradation, StaticText
from minserve.server.ending import ClientStalled, Ending, settle, settle_later, so_far, tell
from minserve.server.errors import faults_told
from minserve.server.generation import CallTimeouts, Generation, aborted, timed_out
from minserve.server.ports import ServingEngine, TokenStream

_BACKSTOP_S = 1.0  # the reader's own timeout comes first; the engine's is for calls that nobody reads any more
_LAST_WRITE_S = 2.0

CLIENT_CLOSED = RequestError("The client left.", status=499, code="client_closed")


class Gateway:
    """linger: what a client that left had asked for is finished all the same, instead of aborted."""

    def __init__(
        self,
        engine: ServingEngine,
        accounting: Accounting,
        degradation: Degradation,
        *,
        timeouts: TimeoutsConfig,
        pools: PoolsConfig,
        linger: bool = False,
    ) -> None:
        self._engine = engine
        self._accounting = accounting
        self._degradation = degradation
        self._timeouts = timeouts
        self._pools = pools
        self._linger = linger
        self._live: dict[str, Generation] = {}
        self._settling: set[asyncio.Task[None]] = set()

    @property
    def live(self) -> int:
        """Calls that run, and those that still wait to be settled."""
        return len(self._live) + len(self._settling)

    @contextmanager
    def refusals(self, arrival: Arrival) -> Iterator[Known]:
        """For the time before `run`: a call that is refused in this block, or whose client leaves, gets its row, with
        what the block has found out of it by then."""
        known = Known(arrival, arrival.identity.pool())
        try:
            with faults_told(arrival.id):
                yield known
        except RequestError as error:
            self.refuse(known.admission, error)
            raise
        except asyncio.CancelledError:
            self.refuse(known.admission, CLIENT_CLOSED)
            raise

    def refuse(self, admission: Admission, error: RequestError) -> None:
        if error.degraded:
            admission = structs.replace(admission, degraded=error.degraded)
        self._accounting.refuse(admission, error)

    @asynccontextmanager
    async def run(self, call: Call) -> AsyncIterator[Generation]:
        """Run a call. RequestError before anything is submitted if it may not; its streams end with the block."""
        call, text = self._admissible(call)
        if text is not None:
            with faults_told(call.id):
                yield self._static(call, text)
            return
        reservation = await self._reserve(call)
        streams: list[TokenStream] = []
        generation: Generation | None = None
        ending = Ending()
        failure: RequestError | None = None
        linger = False
        try:
            with faults_told(call.id):
                streams.extend(self._engine.submit_all(self._submissions(call)))
                generation = self._live[call.id] = self._generation(call, streams, reservation)
                yield generation
        except RequestError as error:
            ending = Ending(error.status, error.code)
            failure = copy.copy(error)  # that of a dead engine is one object for every call
            raise failure from None
        except (asyncio.CancelledError, ConnectionError) as gone:
            code = "write_stalled" if isinstance(gone, ClientStalled) else CLIENT_CLOSED.code
            ending, linger = Ending(CLIENT_CLOSED.status, code), self._linger
            raise
        except BaseException:
            ending = Ending(500, "internal_error")
            raise
        finally:
            self._live.pop(call.id, None)
            if generation is not None:
                generation.close()
                generation.mark()
            settling = self._finish(call, streams, reservation, ending, linger=linger)
            if failure is not None:
                await tell(failure, reservation, settling)

    def abort(self, call_id: str, by: Identity) -> bool:
        """End a call of the same key, or any call for an admin. False if there is no such call."""
        generation = self._live.get(call_id)
        if generation is None or not (by.admin or by.key == generation.call.identity.key):
            return False
        for i in range(len(generation.streams)):
            self._engine.abort(_submission_id(call_id, i), aborted())
        return True

    async def settled(self, timeout: float) -> None:
        """Wait until what clients left behind is settled too: the end of a drain."""
        if self._settling:
            await asyncio.wait(self._settling, timeout=timeout)

    def abandon(self) -> None:
        """Settle what is known of the calls that run, waiting for no step: the process ends right after this.

        What is not reached here stays open, and the next start settles it at what it reserved.
        """
        for generation in self._live.values():
            generation.mark()
            if generation.reservation is not None:
                generation.reservation.settle(so_far(generation))
        self._accounting.end_now(_LAST_WRITE_S)

    @contextmanager
    def _refusing(self, call: Call) -> Iterator[None]:
        """A call that ends in this block, before it has a reservation, gets its row."""
        try:
            with faults_told(call.id):
                yield
        except RequestError as error:
            self.refuse(call.admission, error)
            raise

    def _admissible(self, call: Call) -> tuple[Call, str | None]:
        """The call as it may run under the load of this moment, and the text instead of an answer, if there is one."""
        with self._refusing(call):
            if call.deadline is not None and asyncio.get_running_loop().time() >= call.deadline:
                raise timed_out("deadline_exceeded")
            return self._degradation.apply(call)

    def _static(self, call: Call, text: str) -> Generation:
        """A generation without the model. It is one request of every cap, and its row is written at once: nothing of it
        can fail."""
        with self._refusing(call):
            self._accounting.static(call.admission)
        generation = self._generation(call, [StaticText(call, text)], None)
        generation.tally.prompt = 0
        return generation

    async def _reserve(self, call: Call) -> Reservation:
        with self._refusing(call):
            return await self._accounting.reserve(call.admission)

    def _submissions(self, call: Call) -> list[Submission]:
        now, timeouts = asyncio.get_running_loop().time(), self._timeouts_of(call)
        return [
            Submission(
                id=_submission_id(call.id, i),
                prompt=prompt,
                params=params,
                n=call.n,
                pool=call.pool,
                priority=call.priority,
                salt=call.salt,
                queue_deadline=now + timeouts.queue,
                deadline=now + timeouts.total + _BACKSTOP_S,
            )
            for i, (prompt, params) in enumerate(zip(call.prompts, call.params, strict=True))
        ]

    def _timeouts_of(self, call: Call) -> CallTimeouts:
        """Its pool's, and its client's deadline where that comes first."""
        own = self._pools.of(call.pool)
        timeouts = CallTimeouts(
            queue=own.queue_timeout_s,
            first_token=own.first_token_s or self._timeouts.first_token_s,
            token_gap=own.token_gap_s or self._timeouts.token_gap_s,
            total=own.total_s or self._timeouts.total_s,
        )
        if call.deadline is None:
            return timeouts
        left = call.deadline - asyncio.get_running_loop().time()
        return replace(timeouts, total=left, total_code="deadline_exceeded") if left < timeouts.total else timeouts

    def _generation(self, call: Call, streams: Sequence[TokenStream], reservation: Reservation | None) -> Generation:
        return Generation(call, streams, reservation, self._timeouts_of(call), self._degradation)

    def _finish(
        self, call: Call, streams: list[TokenStream], reservation: Reservation, ending: Ending, *, linger: bool
    ) -> asyncio.Task[None] | None:
        """Close and settle. What can't end at once, because a step is running, is settled by a task when it has."""
        computed = [stream.progress.computed for stream in streams]
        if not linger:
            for stream in streams:
                stream.close()
        if all(stream.done for stream in streams):
            settle(call, streams, computed, reservation, ending)
            return None
        task = asyncio.create_task(settle_later(call, streams, computed, reservation, ending))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        return task


def _submission_id(call_id: str, prompt: int) -> str:
    return call_id if prompt == 0 else f"{call_id}/{prompt}"


def call_of(request_id: str) -> str:
    """The call that one of the engine's requests belongs to; /status names those: `cmpl-...#0`, `cmpl-.../1#0`."""
    return request_id.partition("#")[0].partition("/")[0]
