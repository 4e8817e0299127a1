"""A call before it runs: what has arrived, what is known of it so far, and what it is once it may run.

Owns no behaviour. It must not know HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from minserve.economics.keys import Identity
from minserve.economics.reservation import Admission
from minserve.request import Pool, SamplingParams


@dataclass(frozen=True, slots=True)
class Arrival:
    """A call before anything of its body is known. started: time.monotonic()."""

    id: str
    endpoint: str
    model: str
    identity: Identity
    started: float


@dataclass(slots=True)
class Known:
    """What is known of a call so far, for its row if it is refused. max_tokens, asked_max_tokens: of one choice."""

    arrival: Arrival
    pool: Pool
    prompt_tokens: int = 0
    max_tokens: int = 0
    asked_max_tokens: int | None = None
    choices: int = 1

    @property
    def admission(self) -> Admission:
        arrival = self.arrival
        return Admission(
            id=arrival.id,
            identity=arrival.identity,
            endpoint=arrival.endpoint,
            model=arrival.model,
            pool=self.pool,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            asked_max_tokens=self.asked_max_tokens,
            choices=self.choices,
            started=arrival.started,
        )


@dataclass(frozen=True, slots=True)
class Call:
    """One validated request: its prompts run side by side, n choices each; choice = prompt index * n + k.

    params: one per prompt, since each prompt leaves its own room for max_tokens. asked_max_tokens: what the request
    named, None if nothing. deadline: time.monotonic() until which the client waits. degraded: what was cut under load,
    "" for nothing.
    """

    arrival: Arrival
    prompts: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]
    n: int = 1
    pool: Pool = Pool.INTERACTIVE
    priority: int = 0
    salt: bytes = b""
    asked_max_tokens: int | None = None
    deadline: float | None = None
    degraded: str = ""

    @property
    def id(self) -> str:
        return self.arrival.id

    @property
    def identity(self) -> Identity:
        return self.arrival.identity

    @property
    def choices(self) -> int:
        return self.n * len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def cut_to(self) -> int | None:
        """The most tokens of a choice, the least over its prompts; None if that is as many as the request named."""
        least = min(params.max_tokens for params in self.params)
        return least if self.asked_max_tokens is not None and least < self.asked_max_tokens else None

    @property
    def admission(self) -> Admission:
        most = max(params.max_tokens for params in self.params)
        known = Known(self.arrival, self.pool, self.prompt_tokens, most, self.asked_max_tokens, self.choices)
        return structs.replace(known.admission, prompts=self.prompts, degraded=self.degraded)
