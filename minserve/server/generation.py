"""A call while it runs: its choices read as one sequence of deltas, under the call's timeouts.

Owns the timeouts of a reader and the count of tokens. It must not know HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from minserve.economics.reservation import Reservation
from minserve.request import FinishReason, RequestError, RequestOutcome, TextDelta
from minserve.server.arrival import Call
from minserve.server.degradation import Degradation
from minserve.server.merge import Merged
from minserve.server.ports import Reader, TokenStream
from minserve.status import PromptProgress


@dataclass(slots=True)
class Tally:
    """Tokens of a call so far. Each prompt counts once, whatever n is; completion tokens of all choices count."""

    prompt: int
    cached: int = 0
    completion: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class CallTimeouts:
    """Seconds: in the queue, until the first token, between two, in all. total_code: what is said when `total` is over.

    The queue's is the engine's to watch.
    """

    queue: float
    first_token: float
    token_gap: float
    total: float
    total_code: str = "total_timeout"

    def next(self, started: float, last: float | None) -> tuple[float, str]:
        """When the next one expires, and its code. last: when the latest token came."""
        if last is None:
            waiting = started + self.first_token, "first_token_timeout"
        else:
            waiting = last + self.token_gap, "token_gap_timeout"
        return min(waiting, (started + self.total, self.total_code))


class Generation:
    def __init__(
        self,
        call: Call,
        streams: Sequence[TokenStream],
        reservation: Reservation | None,
        timeouts: CallTimeouts,
        degradation: Degradation,
    ) -> None:
        """reservation: None for what costs nothing, because it is not the model's."""
        self.call = call
        self.streams = streams
        self.reservation = reservation
        self.tally = Tally(call.prompt_tokens)
        self.timeouts = timeouts
        self._degradation = degradation
        self._source: Reader = streams[0] if len(streams) == 1 else Merged(streams, call.n)
        self._open = call.choices
        self._seen = [0] * call.choices
        self._failure: RequestError | None = None
        self._clock = asyncio.get_running_loop().time
        self._started = self._clock()
        self._last: float | None = None

    @property
    def done(self) -> bool:
        """Every choice has come to a normal end."""
        return self._open == 0 and self._failure is None

    @property
    def degraded(self) -> str:
        """What was cut under load by now, "" for nothing."""
        return self._degradation.met(self.call, self._started)

    @property
    def paused(self) -> bool:
        """It stands still under load, whatever it was at."""
        return self.call.pool in self._degradation.paused()

    def mark(self) -> None:
        """What was cut since the reservation stands in its row too, when that is settled."""
        if self.reservation is not None:
            self.reservation.row.degraded = self.degraded

    @property
    def cost(self) -> int | None:
        """What a call that is done costs, in billionths of the currency; None where nothing has a price."""
        if self.reservation is None or not self.reservation.row.reserved:
            return None
        return self.reservation.price(self.tally.prompt, self.tally.cached, self.tally.completion)

    @property
    def headers(self) -> dict[str, str]:
        """What is known of the call by now: what was cut, what is reserved, its cost once it has been settled."""
        headers = {"x-minserve-degraded": self.degraded} if self.degraded else {}
        if self.reservation is None:
            return headers
        if (most := self.call.cut_to) is not None:
            headers["x-minserve-max-tokens"] = str(most)
        return headers | self.reservation.headers()

    @property
    def static(self) -> bool:
        """Its text is not the model's."""
        return self.reservation is None

    @property
    def begun(self) -> bool:
        """A token has come."""
        return self._last is not None

    @property
    def progress(self) -> PromptProgress:
        """Of the first prompt that is not done; of the only one, usually."""
        return next((s.progress for s in self.streams if not s.done), self.streams[-1].progress)

    @property
    def outcomes(self) -> list[RequestOutcome]:
        return [outcome for stream in self.streams for outcome in stream.outcomes]

    async def read(self, patience: float) -> list[TextDelta]:
        """What is new; empty if nothing came for `patience` seconds. RequestError if time is up or a choice failed.

        Of a failed call everything that came before the failure is returned first.
        """
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        expiry, code = self.timeouts.next(self._started, self._last)
        try:
            async with asyncio.timeout_at(min(self._clock() + patience, expiry)):
                deltas = await self._source.__anext__()
        except TimeoutError:
            if self._clock() >= expiry:
                raise timed_out(code) from None
            return []
        self._last = self._clock()
        for delta in deltas:
            self._count(delta)
        good = [delta for delta in deltas if not _failed(delta)]
        if not good and self._failure is not None:
            raise self._failure.with_traceback(None)
        return good

    def close(self) -> None:
        """Stop reading; the streams are somebody else's to close."""
        if isinstance(self._source, Merged):
            self._source.close()

    def _count(self, delta: TextDelta) -> None:
        tally = self.tally
        tally.completion += len(delta.token_ids)
        self._seen[delta.choice] += len(delta.token_ids)
        if delta.finish is None:
            return
        self._open -= 1
        if _failed(delta):
            self._failure = self._failure or delta.error or aborted()
        elif delta.usage is not None:
            tally.completion += delta.usage.completion - self._seen[delta.choice]
            if delta.choice % self.call.n == 0:
                tally.cached += delta.usage.cached


def _failed(delta: TextDelta) -> bool:
    return delta.error is not None or delta.finish in (FinishReason.ABORT, FinishReason.ERROR)


_TIMED_OUT = {
    "first_token_timeout": "No token came within the time this server allows.",
    "token_gap_timeout": "The next token did not come within the time this server allows.",
    "total_timeout": "The request took longer than this server allows.",
    "deadline_exceeded": "The request took longer than its client allows.",
}


def timed_out(code: str) -> RequestError:
    """A call that used up its whole time would only do so again: SDKs are told not to repeat that by themselves."""
    return RequestError(
        _TIMED_OUT[code],
        status=504,
        code=code,
        should_retry=False if code in ("total_timeout", "deadline_exceeded") else None,
    )


def aborted() -> RequestError:
    return RequestError("The request was aborted.", status=409, code="aborted", kind="server_error", should_retry=False)
