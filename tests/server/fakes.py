"""A scripted engine: what HTTP tests need when the numbers don't matter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from minserve.request import (
    FinishReason,
    Pool,
    RequestError,
    RequestOutcome,
    Submission,
    TextDelta,
    TokenLogprob,
    Usage,
)
from minserve.status import EngineStatus, LiveRequest, PromptProgress, State

Script = Callable[[Submission], Sequence[list[TextDelta]]]


def say(text: str, *, finish: FinishReason = FinishReason.STOP, cached: int = 0) -> Script:
    """Every choice says `text`, one delta a character, then ends. Tokens are bytes; logprobs are -0.5 where asked."""

    def script(submission: Submission) -> list[list[TextDelta]]:
        reads: list[list[TextDelta]] = []
        budget = submission.params.max_tokens
        scores = tuple(TokenLogprob(t, -1.0, ((t, -1.0),)) for t in submission.prompt[1:])
        for character in text[:budget]:
            reads.append([token(k, character, submission) for k in range(submission.n)])
        usage = Usage(len(submission.prompt), cached, min(budget, len(text.encode())))
        reason = FinishReason.LENGTH if budget < len(text) else finish
        reads.append([TextDelta(k, finish=reason, usage=usage) for k in range(submission.n)])
        if submission.params.prompt_logprobs is not None:
            reads[0] = [replace(d, prompt_logprobs=scores) if d.choice == 0 else d for d in reads[0]]
        return reads

    return script


def token(choice: int, text: str, submission: Submission) -> TextDelta:
    ids = tuple(text.encode())
    k = submission.params.logprobs
    logprobs = tuple(TokenLogprob(i, -0.5, ((i, -0.5), (i + 1, -2.0))[:k]) for i in ids) if k is not None else ()
    return TextDelta(choice, text, ids, logprobs)


class FakeStream:
    """One submission. Reads come from the script, or from `push` where the test drives."""

    def __init__(self, engine: FakeEngine, submission: Submission, reads: Sequence[list[TextDelta]] | None) -> None:
        self.submission = submission
        self.outcomes: list[RequestOutcome] = []
        self.progress = PromptProgress("queued", 0, len(submission.prompt), 0)
        self.closed = False
        self._engine = engine
        self._reads = asyncio.Queue[list[TextDelta]]()
        self._open = set(range(submission.n))
        for read in reads or ():
            self._reads.put_nowait(read)

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> list[TextDelta]:
        if self.done and self._reads.empty():
            raise StopAsyncIteration
        deltas = await self._reads.get()
        for delta in deltas:
            self._account(delta)
        return deltas

    def push(self, *deltas: TextDelta) -> None:
        self._reads.put_nowait(list(deltas))

    def end(self, finish: FinishReason, error: RequestError | None = None) -> None:
        """What an abort, a failure or a drain does to the unfinished choices."""
        deltas = [TextDelta(k, finish=finish, error=error, usage=self._usage(0)) for k in sorted(self._open)]
        for delta in deltas:
            self._account(delta)
        if deltas:
            self._reads.put_nowait(deltas)

    def close(self) -> None:
        if not self.done:
            self.closed = True
            self.end(FinishReason.ABORT)

    @property
    def done(self) -> bool:
        return not self._open

    def _usage(self, completion: int) -> Usage:
        return Usage(len(self.submission.prompt), 0, completion)

    def _account(self, delta: TextDelta) -> None:
        if delta.finish is None or delta.choice not in self._open:
            return
        self._open.discard(delta.choice)
        began = delta.finish in (FinishReason.STOP, FinishReason.LENGTH)
        self.outcomes.append(
            RequestOutcome(
                id=f"{self.submission.id}#{delta.choice}",
                group=self.submission.id,
                pool=self.submission.pool,
                usage=delta.usage or self._usage(0),
                max_tokens=self.submission.params.max_tokens,
                finish=delta.finish,
                error_code=delta.error.code if delta.error else None,
                arrival=0.0,
                queue=0.25,
                ttft=0.5 if began else None,
                total=1.5,
                gaps=(0.5, 0.5) if began else (),
                preemptions=0,
            )
        )
        if self.done:
            self._engine.streams.pop(self.submission.id, None)


class FakeEngine:
    """script None: the test pushes deltas into `streams` itself."""

    def __init__(self, script: Script | None = say("Hello")) -> None:  # noqa: B008
        self.script = script
        self.state = State.READY
        self.refusal: RequestError | None = None
        self.submissions: list[Submission] = []
        self.streams: dict[str, FakeStream] = {}
        self.arrived = asyncio.Event()
        self.waiting = 0  # interactive calls that wait, and how long a new one would: what degradation goes by
        self.seconds = 0.0
        self.paused: Callable[[], frozenset[Pool]] = frozenset

    def submit(self, submission: Submission) -> FakeStream:
        if self.refusal is not None:
            raise self.refusal
        self.submissions.append(submission)
        stream = FakeStream(self, submission, self.script(submission) if self.script else None)
        self.streams[submission.id] = stream
        self.arrived.set()
        return stream

    def submit_all(self, submissions: Sequence[Submission]) -> list[FakeStream]:
        return [self.submit(submission) for submission in submissions]

    async def stream(self) -> FakeStream:
        """The next stream that is opened, or the latest one."""
        await asyncio.wait_for(self.arrived.wait(), 5)
        return list(self.streams.values())[-1]

    def abort(self, submission_id: str, error: RequestError | None = None) -> bool:
        stream = self.streams.get(submission_id)
        if stream is None:
            return False
        stream.end(FinishReason.ABORT if error is None else FinishReason.ERROR, error)
        return True

    def status(self) -> EngineStatus:
        live = len(self.streams)
        return EngineStatus(
            state=self.state,
            steps=0,
            running={Pool.INTERACTIVE: live, Pool.BULK: 0},
            waiting={Pool.INTERACTIVE: self.waiting, Pool.BULK: 0},
            blocks_total=100,
            blocks_free=100 - live,
            blocks_cached=0,
            streams=live,
            step_age=None,
        )

    def wait(self, pool: Pool) -> float:
        return self.seconds

    def pause(self, pools: Callable[[], frozenset[Pool]]) -> None:
        self.paused = pools

    def requests(self) -> list[LiveRequest]:
        return [LiveRequest(f"{id}#0", Pool.INTERACTIVE, "decode", 2, 2, 1, (5,)) for id in self.streams]

    async def drain(self, timeout: float) -> None:
        self.state = State.DRAINING
        for stream in list(self.streams.values()):
            stream.end(
                FinishReason.ERROR, RequestError("The server is shutting down.", status=503, code="shutting_down")
            )

    async def stop(self) -> None:
        self.state = State.STOPPED
