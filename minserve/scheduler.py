"""The only owner of requests and KV blocks: submit, plan, commit, finish. Knows token ids, never text.

`plan` asks the policy what the next step computes and makes room for it; `commit` takes the tokens that came out;
`finish` ends a request in whatever state it is. Everything is called on one thread, between steps. It must not know
arrays, clocks or how tokens are computed.

A request is in one of three places: in line, beside the line until its leader has computed their common prompt
(`waiting.py`), or running: then it has a seat and blocks (`cache.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from minserve.batch import ChunkResult, StepResult
from minserve.cache import Cache
from minserve.events import end_event, finish_reason, no_valid_token, token_event
from minserve.policy.admission import never_fits
from minserve.policy.limits import Limits
from minserve.policy.schedule import PlanFunction, plan_step
from minserve.request import (
    Chunk,
    FinishReason,
    Pool,
    Request,
    RequestError,
    StepPlan,
    Submission,
    TokenEvent,
    TokenLogprob,
)
from minserve.views import Views
from minserve.waiting import Waiting


@dataclass(frozen=True, slots=True)
class Counts:
    """A snapshot for observers: requests per pool, blocks, prompt tokens looked up and found in the prefix index."""

    running: Mapping[Pool, int]
    waiting: Mapping[Pool, int]
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    prefix_queries: int
    prefix_hits: int


class Scheduler:
    """limits may be replaced between steps. requests: all live ones by id, waiting ones too; read only."""

    def __init__(
        self, limits: Limits, *, weights_id: bytes, prefix_caching: bool = True, plan: PlanFunction = plan_step
    ) -> None:
        self.limits = limits
        self.requests: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._waiting = Waiting()
        self._cache = Cache(limits.num_blocks, limits.block_size, weights_id, prefix_caching=prefix_caching)
        self._policy = plan
        self._step = 0

    # -- requests come

    def submit(self, submission: Submission, seed: int, now: float) -> tuple[Request, ...]:
        """Queue n requests "id#choice" of one prompt.

        RequestError if they can never fit or the id is in use; nothing is kept then.
        """
        if submission.id in self._waiting.groups:
            raise RequestError("A request with this id is not finished yet.", status=409, code="duplicate_id")
        refusal = never_fits(len(submission.prompt), self.limits)
        if refusal is not None:
            raise refusal.error()
        requests = tuple(self._request(submission, choice, seed, now) for choice in range(submission.n))
        for request in requests:
            self.requests[request.id] = request
            self._cache.open(request)
        self._waiting.add_group(requests)
        return requests

    def _request(self, submission: Submission, choice: int, seed: int, now: float) -> Request:
        return Request(
            id=f"{submission.id}#{choice}",
            group=submission.id,
            choice=choice,
            pool=submission.pool,
            priority=submission.priority,
            prompt_len=len(submission.prompt),
            tokens=list(submission.prompt),
            params=submission.params,
            seed=seed,
            arrival=now,
            salt=submission.salt,
            since=self._step,
        )

    # -- plan

    @property
    def decoding(self) -> int:
        """Running requests that have read their prompts, without those of paused pools."""
        paused = self.limits.paused
        return sum(r.known - r.computed == 1 and r.pool not in paused for r in self._running.values())

    def plan(self) -> StepPlan:
        """Decide the next step and make room for it: afterwards blocks and seats are taken, victims are back in line.

        Every plan must be followed by `commit` or `fail`, one without chunks by `commit` of an empty result.
        """
        prompts = [request for request in self._running.values() if request.known - request.computed > 1]
        for request in prompts:
            self._cache.jump(request)
        views = Views(self.requests, self._waiting, self._cache, self._step)
        plan = views.ask(self._policy, self._running.values(), prompts, self.limits)
        self._step += 1
        self._apply(plan)
        return plan

    def _apply(self, plan: StepPlan) -> None:
        for request_id in plan.skipped:
            self.requests[request_id].skips += 1
        for request_id in plan.preempted:
            self._preempt(self.requests[request_id])
        forks = {fork: chunk.request_id for chunk in plan.chunks for fork in chunk.forks}
        for request_id in plan.admitted:
            request = self.requests[request_id]
            self._waiting.take(request)
            self._running[request_id] = request
            if request_id not in forks:  # found blocks are held before anything is allocated, which could evict them
                self._cache.seat(request)
                request.skips = 0
        for chunk in plan.chunks:
            request = self.requests[chunk.request_id]
            request.skips = max(0, request.skips - 1)  # makes up for one rest (policy/turns.py)
            self._cache.grow(request, chunk.start + chunk.count)
        for fork, leader in forks.items():
            self._cache.fork(self.requests[leader], self.requests[fork])

    def _preempt(self, request: Request) -> None:
        """Back into line; it finds its own blocks again unless they are evicted by then."""
        del self._running[request.id]
        self._cache.release(request)
        request.preemptions += 1
        self._waiting.add(request)

    def copies(self) -> tuple[tuple[int, int], ...]:
        """(source, destination) blocks that the coming batch must copy before it computes. Cleared by reading."""
        return self._cache.copies()

    # -- commit

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take what a step computed. Requests that ended meanwhile are passed over.

        Returns one event per accepted token, and one for each request that ends without.
        """
        events: list[TokenEvent] = []
        for chunk, outcome in zip(plan.chunks, result.chunks, strict=True):
            alive = [self.requests[name] for name in (chunk.request_id, *chunk.forks) if name in self.requests]
            if alive and outcome.scored:
                self._waiting.add_scores(alive[0], outcome.scored)
            logprobs = outcome.fork_logprobs or repeat(None)
            for fork_id, token, logprob in zip(chunk.forks, outcome.fork_tokens, logprobs, strict=False):
                if fork_id in self.requests:
                    self._start_fork(self.requests[fork_id], token, logprob, events)
            if chunk.request_id in self.requests:
                self._advance(self.requests[chunk.request_id], chunk, outcome, events)
        self._cache.step_done(ran=bool(plan.chunks))
        ends = (self.finish(request_id, FinishReason.LENGTH) for request_id in plan.exhausted)
        return events + [event for event in ends if event is not None]

    def _start_fork(self, fork: Request, token: int, logprob: TokenLogprob | None, events: list[TokenEvent]) -> None:
        """The leader's prompt is the fork's: shared blocks, and a copy of the last rows made before the next step."""
        fork.computed = fork.cached = fork.prompt_len
        fork.scored = len(self._waiting.groups[fork.group].scores)
        self._accept(fork, (token,), (logprob,), events)

    def _advance(self, request: Request, chunk: Chunk, outcome: ChunkResult, events: list[TokenEvent]) -> None:
        request.computed = chunk.start + chunk.count
        if chunk.samples:
            request.computed -= len(chunk.draft) - (len(outcome.tokens) - 1)  # rows of rejected drafts
            self._waiting.stop_leading(request)
            self._accept(request, outcome.tokens, outcome.logprobs, events)
            return
        self._cache.advance(request)
        if request.computed >= request.limit:  # no output is wanted, at most the prompt's log probabilities
            scores = self._scores(request)
            self._end(request, FinishReason.LENGTH)
            events.append(end_event(request, prompt_logprobs=scores))

    def _accept(
        self,
        request: Request,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob | None],
        events: list[TokenEvent],
    ) -> None:
        """Append tokens up to the one that ends the request, and put full blocks into the index."""
        finish = None
        for token, logprob in zip(tokens, chain(logprobs, repeat(None)), strict=False):
            if token < 0:
                self._end(request, FinishReason.ERROR)
                events.append(end_event(request, no_valid_token()))
                return
            request.tokens.append(token)
            finish = finish_reason(request)
            scores = self._scores(request) if request.output_len == 1 else ()
            events.append(token_event(request, logprob, finish, scores))
            if finish is not None:
                break
        request.computed = min(request.computed, request.known - 1)
        self._cache.advance(request)
        if finish is not None:
            self._end(request, finish)

    def _scores(self, request: Request) -> tuple[TokenLogprob, ...]:
        """Log probabilities of the prompt, for who asked: delivered once, with the first token."""
        return tuple(self._waiting.groups[request.group].scores) if request.params.prompt_logprobs is not None else ()

    # -- requests go

    def fail(self, plan: StepPlan, error: RequestError) -> list[TokenEvent]:
        """A step that raised ends exactly the requests it computed, forks included."""
        ids = [request_id for chunk in plan.chunks for request_id in (chunk.request_id, *chunk.forks)]
        events = [self.finish(request_id, FinishReason.ERROR, error) for request_id in ids]
        self._cache.step_failed(self.requests)
        return [event for event in events if event is not None]

    def finish(self, request_id: str, reason: FinishReason, error: RequestError | None = None) -> TokenEvent | None:
        """End a request in whatever state it is: stop strings, aborts, timeouts. None if it has ended already."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        self._end(request, reason)
        return end_event(request, error)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """The one way out: seat, blocks and place in line are given back."""
        request.finish = reason
        del self.requests[request.id]
        if request.seat >= 0:
            del self._running[request.id]
            self._cache.release(request)
        else:
            self._waiting.take(request)
        self._waiting.leave(request)
        self._cache.close(request)

    # -- for observers and tests

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def counts(self) -> Counts:
        pools = [request.pool for request in self._running.values()]
        blocks = self._cache.blocks
        return Counts(
            running={pool: pools.count(pool) for pool in Pool},
            waiting={pool: self._waiting.in_line[pool] + self._waiting.beside[pool] for pool in Pool},
            blocks_total=blocks.total,
            blocks_free=blocks.free,
            blocks_cached=blocks.cached,
            prefix_queries=self._cache.queries,
            prefix_hits=self._cache.hits,
        )

    def check(self) -> None:
        """The invariant of blocks, seats and lines; AssertionError says what is wrong."""
        self._cache.check(self._running.values())
        self._waiting.check(request for request in self.requests.values() if request.id not in self._running)
        for request in self.requests.values():
            idle = request.seat < 0 and not request.blocks and request.computed == 0
            assert (request.id in self._running) != idle, f"{request.id}: neither running nor waiting"
            assert request.finish is None, f"{request.id} has ended"
