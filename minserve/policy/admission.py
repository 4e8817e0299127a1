"""Whether a submission is let into the queue at all: decided before any work is spent, so that nothing waits for ever.

Pure: sizes and loads in, a verdict out. It must not know queues, clocks or HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass

from minserve.policy.limits import Limits
from minserve.request import RequestError, Submission

MIN_RETRY, MAX_RETRY = 1.0, 600.0  # seconds


@dataclass(frozen=True, slots=True)
class Load:
    """What a pool has before it. queued: requests. wait: seconds until a call that comes now would start."""

    queued: int
    max_queue: int
    wait: float = 0.0

    @property
    def full(self) -> bool:
        return self.queued >= self.max_queue


@dataclass(frozen=True, slots=True)
class Reject:
    """Why it may not wait. retry_after: seconds, where trying again makes sense."""

    status: int
    code: str
    message: str
    retry_after: float | None = None

    def error(self) -> RequestError:
        param = "prompt" if self.status == 400 else None
        return RequestError(self.message, status=self.status, code=self.code, param=param, retry_after=self.retry_after)


def admit(submission: Submission, limits: Limits, load: Load) -> Reject | None:
    """Refuse what can never run (400) and what would wait behind a full queue (503, with the time to come back).

    None: it may wait; sooner or later it runs.
    """
    refusal = never_fits(len(submission.prompt), limits)
    if refusal is not None:
        return refusal
    if load.full:
        return Reject(
            503,
            "queue_full",
            f"{load.queued} requests are waiting in the {submission.pool} pool, which takes no more than "
            f"{load.max_queue}. Try again later.",
            retry_after=retry_after(load.wait),
        )
    return None


def retry_after(wait: float) -> float:
    """When to come back, of how long a call would wait now."""
    return min(MAX_RETRY, max(MIN_RETRY, wait))


def queue_timeout(wait: float) -> RequestError:
    """For who was let in and then waited longer than it may."""
    return RequestError(
        "The request waited in the queue longer than the server allows.",
        status=503,
        code="queue_timeout",
        retry_after=retry_after(wait),
    )


def never_fits(prompt_tokens: int, limits: Limits) -> Reject | None:
    """A prompt needs room for one token after it in all KV blocks together."""
    if prompt_tokens < limits.capacity:
        return None
    return Reject(
        400,
        "context_length_exceeded",
        f"This server's KV cache holds {limits.capacity} tokens ({limits.num_blocks} blocks of {limits.block_size}). "
        f"However, your prompt has {prompt_tokens} tokens and needs room for at least one more. "
        "Please reduce the length of the prompt.",
    )
