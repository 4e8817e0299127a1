"""The vocabulary that every room shares: what a request is, what a step plans, what observers see.

Owns no state and imports nothing but the standard library. It must not know text, arrays, HTTP or clocks:
times are plain floats handed in by whoever measured them (seconds, `time.monotonic`).

The one idea to take away: a request has *known* tokens (prompt + accepted output) and *computed* tokens (rows in
the KV cache). A step runs chunks `known[computed : computed + count]`; a chunk that reaches the end of `known` is
sampled. Decode is a chunk of one. Prefill, a prefix-cache hit and recomputation after preemption are the same thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal, NamedTuple


class Pool(StrEnum):
    """Which queue a request waits in. Interactive work goes first, bulk fills what is left."""

    INTERACTIVE = "interactive"
    BULK = "bulk"


class FinishReason(StrEnum):
    """Why a request ended. Only STOP and LENGTH are normal ends; the wire shows the others as error events."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestError(Exception):
    """A refusal or failure that the client is told about, decided before any work is spent where that is possible.

    status: HTTP status. code: machine-readable (`context_length_exceeded`). param: the field at fault, if one is.
    kind: OpenAI's `type`; default: invalid_request_error below 500, server_error from there.
    retry_after: seconds until a retry makes sense. should_retry: overrides what an SDK concludes from the status.
    degraded: the rung of degradation that refuses it, "" for any other reason.
    reserved, cost: of the call that this has ended, in billionths of the currency; None where nothing was reserved, and
    while the cost is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        param: str | None = None,
        kind: str | None = None,
        retry_after: float | None = None,
        should_retry: bool | None = None,
        degraded: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.retry_after = retry_after
        self.should_retry = should_retry
        self.degraded = degraded
        self.reserved: int | None = None
        self.cost: int | None = None


_NOTHING: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Already validated: ranges are checked where the body is decoded.

    max_tokens is always set (a server default exists for every endpoint). temperature 0 is greedy; top_k 0, top_p 1
    and min_p 0 are off. seed None draws one at submission. logprobs None is off, k >= 0 asks for the sampled token's
    log probability and the k best. prompt_logprobs likewise for the prompt. `stop` is matched in text, above the
    scheduler; `stop_token_ids` (which includes the model's end tokens unless ignore_eos) in the scheduler.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NOTHING)
    allowed_token_ids: frozenset[int] | None = None
    banned_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop: bool = False

    @property
    def penalized(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated. Mutable, owned by the Scheduler, changed only between steps on the event loop.

    tokens: known tokens, prompt first. computed: how many of them have rows in the KV cache. blocks: the block ids
    that hold those rows, in order. seat: small stable integer while running, else -1. group: requests that share one
    prompt (n > 1); one of them leads, the others wait for its prompt. cached: prompt tokens found in the prefix index
    before they were ever computed. scored: how many prompt positions have their log probability. since: the step it
    was submitted in. skips: steps in which others went before it, less those that made up for it since it runs.
    """

    id: str
    group: str
    choice: int
    pool: Pool
    priority: int
    prompt_len: int
    tokens: list[int]
    params: SamplingParams
    seed: int
    arrival: float
    salt: bytes = b""
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    seat: int = -1
    cached: int = 0
    scored: int = 0
    finish: FinishReason | None = None
    preemptions: int = 0
    since: int = 0
    skips: int = 0

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def limit(self) -> int:
        """The most tokens this request can ever know."""
        return self.prompt_len + self.params.max_tokens


class View(NamedTuple):
    """What a policy may know of a request. Counts are tokens unless said otherwise. (A tuple: there is a new one per
    request and step, and a frozen dataclass takes four times as long to make.)

    blocks: block ids held. own_blocks: those that would become free if it were preempted (no other holder).
    For a waiting request `computed` already counts the prefix-cache hit it would start from, `blocks` the shared
    blocks of that hit and `free_hits` those among them that now count as free. age: steps since it was submitted.
    limit: the most tokens it can ever know. prompt_len: how many of the known ones its prompt has. blocked: waits for a
    prefix that another request computes right now.
    forks: ids of waiting siblings that can start from its last prompt row. scored: positions [from, to) of the prompt
    whose next token is to be scored. draft: tokens that are proposed to follow the known ones.
    """

    id: str
    known: int
    computed: int
    blocks: int
    own_blocks: int
    pool: Pool
    priority: int
    arrival: float
    age: int
    preemptions: int
    limit: int
    prompt_len: int = 0
    skips: int = 0
    free_hits: int = 0
    blocked: bool = False
    forks: tuple[str, ...] = ()
    scored: tuple[int, int] = (0, 0)
    draft: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of one request to compute in a step, from position `start`; drafts are counted too.

    All of them belong to the prompt or none does (`Batch.generated` says why).

    samples: rows to sample (0, 1, or 1 + len(draft)). scored: rows whose next token is already known and whose log
    probability is wanted (echo). forks: siblings whose first token is sampled from this chunk's last row.
    Logit rows of a chunk come in this order: scored rows, sampled rows, one row per fork.
    """

    request_id: str
    start: int
    count: int
    samples: int
    draft: tuple[int, ...] = ()
    scored: int = 0
    forks: tuple[str, ...] = ()


WaitReason = Literal["seats", "blocks", "step_budget", "rows", "pool_share", "paused", "prefix", "group", "queue"]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step will do. Pure data: planning changes no state.

    admitted: ids that leave the queue (forks included). preempted: ids that lose their blocks and go back to its
    front. exhausted: ids that can't grow, since they are alone or know more than all blocks hold; they finish with
    LENGTH. skipped: ids that others overtake in this step: waiting ones, by a later request, and decodes that get no
    token so that others may read their prompts. waits: why requests still wait, reason -> how many: seats, blocks,
    step_budget, rows, pool_share (the other pool's promised part), paused (their pool), prefix (being computed), group
    (for their leader), queue (behind those who could be looked at).
    """

    step: int
    chunks: tuple[Chunk, ...] = ()
    admitted: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    exhausted: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    waits: Mapping[WaitReason, int] = field(default_factory=lambda: _NOTHING)

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. completion counts every sampled token, the stop token too."""

    prompt: int
    cached: int
    completion: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a token under the raw softmax (before temperature), and the best alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One accepted token (token_id >= 0) or an end without one (-1). Ids only: text is made above the scheduler.

    index: position in the output, 0-based. error: why, where finish is ERROR.
    prompt_logprobs: positions 1.. of the prompt, delivered with the first token that follows them.
    """

    request_id: str
    index: int
    token_id: int
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None
    error: RequestError | None = None
    usage: Usage | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a stream's reader gets: new text of one choice, with the tokens that became complete in it.

    The last delta of a choice has `finish`, `usage` and, for STOP, the stop string or token id that ended it.
    """

    choice: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    error: RequestError | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    """What the gateway hands to the engine: one prompt, n choices, already tokenized, validated and reserved.

    deadline: monotonic seconds after which it is aborted; queue_deadline: after which it is refused if it has not
    started.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    pool: Pool = Pool.INTERACTIVE
    priority: int = 0
    salt: bytes = b""
    queue_deadline: float | None = None
    deadline: float | None = None


PHASES = ("plan", "build", "run", "commit", "deliver")  # of a step, in order; fields of StepRecord


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What observers learn of one step. Durations in seconds.

    ideal: time the step's bytes and FLOPs would take at the device's measured peaks; utilization = sum(ideal) /
    wall time. waiting: per pool. waits: why (reason -> requests). ttfts and gaps: (pool, seconds) of each first
    token and of each later token delivered by this step.
    """

    step: int
    started: float
    plan: float
    build: float
    run: float
    commit: float
    deliver: float
    ideal: float
    decode_tokens: int
    prefill_tokens: int
    running: Mapping[Pool, int]
    waiting: Mapping[Pool, int]
    waits: Mapping[WaitReason, int]
    preempted: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    prefix_queries: int = 0
    prefix_hits: int = 0
    ttfts: tuple[tuple[Pool, float], ...] = ()
    gaps: tuple[tuple[Pool, float], ...] = ()
    failed: str | None = None

    @property
    def tokens(self) -> int:
        """0 where nothing could run: all who are left wait."""
        return self.decode_tokens + self.prefill_tokens


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """How one request (one choice) ended: exactly one per submitted request, aborted and failed ones too.

    Times in seconds; ttft None if no token came. gaps: between tokens, in order.
    """

    id: str
    group: str
    pool: Pool
    usage: Usage
    max_tokens: int
    finish: FinishReason
    error_code: str | None
    arrival: float
    queue: float
    ttft: float | None
    total: float
    gaps: tuple[float, ...]
    preemptions: int
