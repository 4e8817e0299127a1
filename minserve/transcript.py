"""From one request's token events to the text its reader sees, and the times that tell how it went.

Owns a request's detokenizer, stop checker and timeline; lives from submission to the last delta. Touched on the event
loop only. It must not know the scheduler, and changes nothing of the request: it says that a stop string matched, the
engine acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minserve.request import FinishReason, Request, RequestError, RequestOutcome, TextDelta, TokenEvent, Usage
from minserve.text.detokenize import Detokenizer
from minserve.text.stop import StopChecker
from minserve.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Timeline:
    """Monotonic seconds. gaps: between one token's delivery and the next."""

    arrival: float
    started: float | None = None
    first: float | None = None
    last: float | None = None
    gaps: list[float] = field(default_factory=list)

    def token(self, now: float) -> None:
        if self.last is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now


class Transcript:
    """Feed it `push(event)` for every token event of a request, in order; it returns what to deliver."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self.time = Timeline(request.arrival)
        self.usage = Usage(request.prompt_len, 0, 0)
        self.stop_reason: str | int | None = None
        params = request.params
        self._end_ids = tokenizer.end_ids
        self._detokenizer = Detokenizer(tokenizer, request.tokens)
        self._stops = StopChecker(params.stop, include=params.include_stop) if params.stop else None
        self._generated = 0

    def push(self, event: TokenEvent, now: float) -> TextDelta:
        """The delta of one token. Its finish is STOP where a stop string completed, whatever the scheduler said."""
        self.time.token(now)
        self._generated += 1
        text, stopped = "", False
        if self._shows(event):
            text, stopped = self._checked(self._detokenizer.push((event.token_id,)))
        else:
            self.stop_reason = None if event.token_id in self._end_ids else event.token_id
        finish = FinishReason.STOP if stopped else event.finish
        if finish is not None and not stopped:
            text += self._flush()
        return self._delta(event, finish, text, (event.token_id,))

    def finish(self, event: TokenEvent) -> TextDelta:
        """The last delta of a request that ends without a token: aborted, failed, timed out, out of blocks."""
        return self._delta(event, event.finish, self._flush(), ())

    def outcome(self, finish: FinishReason, error: RequestError | None, now: float) -> RequestOutcome:
        r, t = self.request, self.time
        return RequestOutcome(
            id=r.id,
            group=r.group,
            pool=r.pool,
            usage=self.usage,
            max_tokens=r.params.max_tokens,
            finish=finish,
            error_code=error.code if error else None,
            arrival=t.arrival,
            queue=(now if t.started is None else t.started) - t.arrival,
            ttft=None if t.first is None else t.first - t.arrival,
            total=now - t.arrival,
            gaps=tuple(t.gaps),
            preemptions=r.preemptions,
        )

    def _shows(self, event: TokenEvent) -> bool:
        """A token that ended the request by its id is no text, unless the caller asked for it."""
        params = self.request.params
        by_id = event.finish is FinishReason.STOP and event.token_id in params.stop_token_ids
        return not by_id or (params.include_stop and event.token_id not in self._end_ids)

    def _checked(self, text: str) -> tuple[str, bool]:
        if self._stops is None:
            return text, False
        allowed = self._generated > self.request.params.min_tokens
        safe, match = self._stops.push(text, allowed=allowed)
        if match is not None:
            self.stop_reason = match
        return safe, match is not None

    def _flush(self) -> str:
        tail = self._detokenizer.flush()
        if self._stops is None:
            return tail
        safe, _ = self._stops.push(tail, allowed=False)
        return safe + self._stops.flush()

    def _delta(
        self, event: TokenEvent, finish: FinishReason | None, text: str, token_ids: tuple[int, ...]
    ) -> TextDelta:
        if event.usage is not None:
            self.usage = event.usage
        elif finish is not None:  # a stop string; tokens that the same step brought behind it don't count
            self.usage = Usage(self.request.prompt_len, self.request.cached, self._generated)
        return TextDelta(
            choice=self.request.choice,
            text=text,
            token_ids=token_ids,
            logprobs=(event.logprob,) if event.logprob is not None else (),
            prompt_logprobs=event.prompt_logprobs,
            finish=finish,
            stop_reason=self.stop_reason if finish is FinishReason.STOP else None,
            error=event.error,
            usage=self.usage if finish is not None else None,
        )
