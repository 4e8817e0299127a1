"""The engine: plan, run, commit. Read `Engine.step` first; everything else in this project hangs on it.

Owns the scheduler, one Transcript per live request and the pace of prompt chunks. All state changes on the thread that
calls `begin`, `complete` and `fail` (the event loop, or a for-loop's); only `run` may be called on another thread, one
step at a time. It must not know asyncio, HTTP or economics.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from minserve.batch import StepResult
from minserve.batch_build import build_batch
from minserve.policy.pace import Pace
from minserve.request import (
    FinishReason,
    Pool,
    RequestError,
    RequestOutcome,
    StepRecord,
    Submission,
    TextDelta,
    TokenEvent,
)
from minserve.runner import Runner
from minserve.scheduler import Counts, Scheduler
from minserve.status import PromptProgress, phase_of
from minserve.step import Step
from minserve.text.tokenizer import Tokenizer
from minserve.transcript import Transcript
from minserve.waiting import place

log = logging.getLogger("minserve.engine")

Observer = Callable[[StepRecord | RequestOutcome], None]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A delta and where it goes; `outcome` is set with the last one of a request."""

    group: str
    delta: TextDelta
    outcome: RequestOutcome | None = None


class Engine:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        itl_target: float = 0.04,
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.observers = list(observers)
        self.clock = clock
        limits = scheduler.limits
        self.pace = Pace(itl_target, quantum=limits.block_size, ceiling=limits.max_step_tokens)
        self.paused: frozenset[Pool] = frozenset()  # pools that get nothing in the next steps
        self._transcripts: dict[str, Transcript] = {}
        self._groups: dict[str, list[str]] = {}
        self._counts = scheduler.counts()  # as the latest step left them

    # -- requests come and go, between steps

    def submit(self, submission: Submission) -> None:
        """Queue a submission's n requests. RequestError if it can never run; nothing is kept then."""
        seed = submission.params.seed
        seed = secrets.randbits(63) if seed is None else seed
        requests = self.scheduler.submit(submission, seed, self.clock())
        self._transcripts |= {request.id: Transcript(request, self.tokenizer) for request in requests}
        self._groups[submission.id] = [request.id for request in requests]

    def abort(self, group: str, error: RequestError | None = None) -> list[Delivery]:
        """End what is unfinished of a submission, in whatever state it is. Idempotent."""
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        out = []
        for request_id in list(self._groups.get(group, ())):
            event = self.scheduler.finish(request_id, reason, error)
            if event is not None:
                out.append(self._end(event))
        return out

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def progress(self, group: str) -> PromptProgress:
        """How far a submission has come; for a reader's "queued" and "reading the prompt"."""
        requests = self.scheduler.requests
        ids = self._groups.get(group)
        if not ids:
            return PromptProgress("done", 0, 0, 0)
        lead = requests[ids[0]]
        phase = phase_of(lead)
        if phase == "queued":
            others = (r for r in requests.values() if r.seat < 0 and r.pool is lead.pool and r.group != group)
            return PromptProgress(phase, 0, lead.prompt_len, sum(place(r) < place(lead) for r in others))
        return PromptProgress(phase, min(lead.computed, lead.prompt_len), lead.prompt_len, 0)

    # -- one step

    def step(self) -> list[Delivery]:
        """Plan, run, commit: what the asynchronous engine does with the run on its worker thread."""
        step = self.begin()
        try:
            result = self.run(step)
        except Exception as error:
            log.exception("step %d failed", step.plan.step)
            return self.fail(step, step_failed(error))
        return self.complete(step, result)

    def begin(self) -> Step:
        """Decide what this step computes and lay it out as arrays."""
        started = self.clock()
        chunk = self.pace.chunk_tokens(self.scheduler.decoding)
        limits, worth = self.scheduler.limits, self.pace.decode_worth
        if (chunk, worth, self.paused) != (limits.chunk_tokens, limits.decode_worth, limits.paused):
            self.scheduler.limits = replace(limits, chunk_tokens=chunk, decode_worth=worth, paused=self.paused)
        plan = self.scheduler.plan()
        planned = self.clock()
        for request_id in plan.admitted:
            timeline = self._transcripts[request_id].time
            if timeline.started is None:
                timeline.started = planned
        batch = build_batch(
            plan,
            self.scheduler.requests,
            block_size=self.scheduler.limits.block_size,
            vocab_size=self.runner.spec.vocab_size,
            copies=self.scheduler.copies(),
        )
        return Step(plan, batch, started, planned - started, self.clock() - planned)

    def run(self, step: Step) -> StepResult:
        """The only part that takes long. Any thread, one step at a time, touches no state of the engine."""
        if not step.plan.chunks:
            return StepResult(())
        started = self.clock()
        result = self.runner.run(step.plan, step.batch)
        step.run_s = self.clock() - started
        return result

    def complete(self, step: Step, result: StepResult) -> list[Delivery]:
        """Commit the result, turn tokens into text, end what a stop string ends, tell the observers."""
        started = self.clock()
        events = self.scheduler.commit(step.plan, result)
        now = self.clock()
        out: list[Delivery] = []
        for event in events:
            self._deliver(event, step, now, out)
        delivered = self.clock()
        if step.plan.chunks:
            self.pace.observe(step.decode_tokens, step.prefill_tokens, started - step.started)
        ideal = self.runner.ideal_seconds(step.batch) if step.plan.chunks else 0.0
        self._notify(step.record(*self._counted(), ideal=ideal, commit=now - started, deliver=delivered - now))
        return out

    def fail(self, step: Step, error: RequestError) -> list[Delivery]:
        """A step that raised ends its own requests and nobody else's."""
        out = [self._end(event) for event in self.scheduler.fail(step.plan, error)]
        self._notify(step.record(*self._counted(), failed=error.message))
        return out

    def fail_all(self, error: RequestError) -> list[Delivery]:
        """The engine gives up: every live request gets the error."""
        return [delivery for group in list(self._groups) for delivery in self.abort(group, error)]

    # -- text and ends

    def _deliver(self, event: TokenEvent, step: Step, now: float, out: list[Delivery]) -> None:
        transcript = self._transcripts.get(event.request_id)
        if transcript is None:  # a stop string ended it earlier in this commit (several tokens a step)
            return
        if event.token_id < 0:
            out.append(self._end(event))
            return
        delta = transcript.push(event, now)
        step.note_token(transcript)
        if delta.finish is FinishReason.STOP and event.finish is None:  # a stop string: the scheduler can't see those
            self.scheduler.finish(event.request_id, FinishReason.STOP)
        if delta.finish is None:
            out.append(Delivery(transcript.request.group, delta))
        else:
            out.append(self._close(transcript, delta))

    def _end(self, event: TokenEvent) -> Delivery:
        transcript = self._transcripts[event.request_id]
        return self._close(transcript, transcript.finish(event))

    def _close(self, transcript: Transcript, delta: TextDelta) -> Delivery:
        """The one place where a request's transcript is released and its outcome reported."""
        request = transcript.request
        del self._transcripts[request.id]
        members = self._groups[request.group]
        members.remove(request.id)
        if not members:
            del self._groups[request.group]
        outcome = transcript.outcome(delta.finish or FinishReason.ERROR, delta.error, self.clock())
        self._notify(outcome)
        return Delivery(request.group, delta, outcome)

    def _counted(self) -> tuple[Counts, Counts]:
        """The counts that the step before left, and those of now."""
        before, self._counts = self._counts, self.scheduler.counts()
        return before, self._counts

    def _notify(self, record: StepRecord | RequestOutcome) -> None:
        for observer in self.observers:
            try:
                observer(record)
            except Exception:  # an observer must not be able to stop serving
                log.exception("observer failed")


def step_failed(error: Exception) -> RequestError:
    """What clients are told when a step raised: no message of ours or of a library's, which could hold their text."""
    return RequestError(
        f"The engine failed while computing this request ({type(error).__name__}).", status=500, code="engine_error"
    )
