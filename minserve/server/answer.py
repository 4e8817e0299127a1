"""What chat and completions answers have in common: the head, the options, usage, metrics, merged deltas.

Owns how the tokens of a call are counted on the wire. It must not know HTTP or how either endpoint shapes a choice.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import UNSET, UnsetType

from minserve.economics.prices import NANO
from minserve.request import FinishReason, RequestError, RequestOutcome, TextDelta
from minserve.server.generation import Generation, Tally
from minserve.server.schema import GenerationBody
from minserve.server.wire import CompletionDetails, Finish, Metrics, PromptDetails, Response, UsageBody, event


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller wants to see beside the text.

    usage: the totals, on a stream as a last chunk without choices. running_usage: counts so far on every chunk. As in
    vLLM, `continuous_usage_stats` counts only together with `include_usage`: alone it changes nothing.
    """

    usage: bool
    running_usage: bool
    token_ids: bool
    metrics: bool
    logprobs: bool

    @classmethod
    def of(cls, body: GenerationBody, *, logprobs: bool) -> Options:
        asked = body.stream_options
        if asked is not None and not body.stream:
            raise RequestError("`stream_options` needs `stream` to be true.", param="stream_options")
        usage = asked is not None and bool(asked.include_usage)
        return cls(
            usage=usage,
            running_usage=usage and asked is not None and bool(asked.continuous_usage_stats),
            token_ids=body.return_token_ids,
            metrics=body.include_metrics,
            logprobs=logprobs,
        )


@dataclass(frozen=True, slots=True)
class Head:
    """Equal on every chunk of an answer."""

    id: str
    object: str
    created: int
    model: str

    @classmethod
    def new(cls, call_id: str, kind: str, model: str) -> Head:
        return cls(call_id, kind, int(time.time()), model)

    def response(self, choices: list[Any], usage: UsageBody | UnsetType | None = UNSET) -> Response:
        return Response(
            id=self.id, object=self.object, created=self.created, model=self.model, choices=choices, usage=usage
        )


class Answer(ABC):
    """Shapes the deltas of a call. A stream uses `events` and `closing`, a whole answer `collect` and `whole`."""

    def __init__(self, head: Head, options: Options) -> None:
        self.head = head
        self.options = options
        self._usage = None if options.usage else UNSET  # on chunks that don't carry the totals

    @abstractmethod
    def events(self, deltas: Sequence[TextDelta], tally: Tally) -> bytes:
        """The events that these deltas make; may be empty."""

    @abstractmethod
    def collect(self, deltas: Sequence[TextDelta]) -> None: ...

    @abstractmethod
    def whole(self, generation: Generation) -> Response: ...

    @abstractmethod
    def plain(self) -> None:
        """Before anything else: the text to come is not the model's. It holds no thinking and continues no prompt."""

    def closing(self, generation: Generation) -> bytes:
        """The chunk without choices: only for those who asked for what it holds."""
        if not self.options.usage and not self.options.metrics:
            return b""
        return event(self.totals(self.head.response([]), generation, usage=self.options.usage))

    def chunk(self, choice: Any, tally: Tally) -> Response:
        return self.head.response([choice], running_usage(tally) if self.options.running_usage else self._usage)

    def totals(self, response: Response, generation: Generation, *, usage: bool = True) -> Response:
        """The response with what is known at the end."""
        if usage:
            response.usage = usage_body(generation)
        if self.options.metrics:
            response.metrics = metrics_of(generation.outcomes)
        return response


def running_usage(tally: Tally) -> UsageBody:
    """Counts so far. What the cache saved is known at the end, so it isn't claimed to be nothing before."""
    return UsageBody(tally.prompt, tally.completion, tally.prompt + tally.completion)


def usage_body(generation: Generation) -> UsageBody:
    tally, cost = generation.tally, generation.cost
    return UsageBody(
        prompt_tokens=tally.prompt,
        completion_tokens=tally.completion,
        total_tokens=tally.prompt + tally.completion,
        prompt_tokens_details=PromptDetails(tally.cached),
        completion_tokens_details=CompletionDetails(tally.reasoning) if tally.reasoning else UNSET,
        cost=UNSET if cost is None else cost / NANO,
    )


def metrics_of(outcomes: Sequence[RequestOutcome]) -> Metrics:
    """Of the choice that took longest; tokens per second over all of them."""
    slowest = max(outcomes, key=lambda outcome: outcome.total)
    gaps = sum(slowest.gaps)
    first = None if slowest.ttft is None else slowest.ttft - slowest.queue
    tokens = sum(outcome.usage.completion for outcome in outcomes)
    busy = slowest.total - slowest.queue
    return Metrics(
        queue_time_ms=_ms(slowest.queue),
        time_to_first_token_ms=None if first is None else _ms(first),
        generation_time_ms=None if first is None else _ms(gaps),
        mean_itl_ms=_ms(gaps / len(slowest.gaps)) if slowest.gaps else None,
        tokens_per_second=round(tokens / busy, 2) if tokens and busy > 0 else None,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def finish_of(delta: TextDelta) -> Finish:
    return "stop" if delta.finish is FinishReason.STOP else "length"


def coalesce(deltas: Sequence[TextDelta]) -> Sequence[TextDelta]:
    """At most one delta per choice, in order of first appearance: what piled up behind a slow reader leaves as one."""
    if len(deltas) == 1:
        return deltas
    merged: dict[int, TextDelta] = {}
    for delta in deltas:
        before = merged.get(delta.choice)
        merged[delta.choice] = delta if before is None else _joined(before, delta)
    return list(merged.values())


def _joined(a: TextDelta, b: TextDelta) -> TextDelta:
    return replace(
        b,
        text=a.text + b.text,
        token_ids=a.token_ids + b.token_ids,
        logprobs=a.logprobs + b.logprobs,
        prompt_logprobs=a.prompt_logprobs or b.prompt_logprobs,
    )
