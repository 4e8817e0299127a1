"""Which number points where: from what was measured to sentences with a cause and a thing to try.

A pure function. It owns the thresholds; it must not measure anything itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from minserve.observe.numbers import PoolNumbers, Snapshot
from minserve.request import Pool, WaitReason

Weight = Literal["good", "note", "problem"]

_QUEUE_PART = 0.5  # of a TTFT, from which on waiting is its cause
_HOST_SHARE = 0.15  # of wall time spent beside the forward pass
_LOW_UTILIZATION = 0.3
_KV_FULL = 0.9
_ITL_SLACK = 1.5  # steps are planned to take the target; that some take more is no finding
_ENOUGH = 10  # requests in the window; a p99 of fewer is the slowest one, which proves nothing


@dataclass(frozen=True, slots=True)
class Finding:
    weight: Weight
    text: str


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the numbers are judged against. Seconds. connections: calls that the server holds open now."""

    itl_target: float
    ttft_target: float
    seats: int
    blocks_total: int
    blocks_available: int
    waiting: Mapping[Pool, int]
    waits: Mapping[WaitReason, int]
    connections: int = 0


def diagnose(numbers: Snapshot, around: Surroundings) -> list[Finding]:
    """Problems first. At least one sentence, also when all is well."""
    findings = [
        *_ttft(numbers, around),
        *_itl(numbers, around),
        *_device(numbers, around),
        *_cache(numbers, around),
    ]
    if not findings:
        findings = [Finding("good", _calm(numbers, around))]
    return sorted(findings, key=lambda finding: ("problem", "note", "good").index(finding.weight))


def _calm(numbers: Snapshot, around: Surroundings) -> str:
    if not numbers.steps_per_s:
        return "Nothing has run in the last minute."
    pool = numbers.pools[Pool.INTERACTIVE]
    if (pool.ttft_p99 or 0.0) > around.ttft_target or (pool.itl_p99 or 0.0) > around.itl_target * _ITL_SLACK:
        return f"Some numbers are above their targets, but {pool.requests} requests are too few to judge by."
    return "All numbers are within their targets."


def _ttft(numbers: Snapshot, around: Surroundings) -> Iterator[Finding]:
    pool = numbers.pools[Pool.INTERACTIVE]
    if pool.ttft_p99 is None or pool.ttft_p99 <= around.ttft_target or pool.requests < _ENOUGH:
        return
    head = f"Interactive TTFT p99 is {time_text(pool.ttft_p99)} (target {time_text(around.ttft_target)})"
    waited = (pool.queue_p50 or 0.0) > _QUEUE_PART * (pool.ttft_p50 or 0.0)
    if waited or around.waiting.get(Pool.INTERACTIVE, 0):
        yield Finding("problem", f"{head}, and requests queue: {_why(around)}")
    else:
        yield Finding(
            "problem",
            f"{head}, but nobody queues: the time goes into reading prompts. Shorten or share prefixes (the prefix "
            f"cache hit share is {numbers.prefix_hit_share:.0%}), or raise engine.itl_target_ms so that chunks grow.",
        )


def _why(around: Surroundings) -> str:
    reason = max(around.waits, key=lambda name: around.waits[name], default="")
    return {
        "seats": f"all {around.seats} seats are taken. Raise engine.max_num_seqs if blocks are free, or add a machine.",
        "blocks": "KV blocks are short. Give the cache more memory, or lower limits.max_tokens.",
        "step_budget": "the steps are full. The device is at its limit for this mix; move work to the bulk pool.",
        "pool_share": "the pool's share is used up. Look at pools.*.max_num_seqs, token_share and kv_share.",
        "prefix": "they wait for a prefix that another request is reading; that is cheaper than reading it twice.",
    }.get(reason, "more work comes than the device does. Compare tokens per second with what is asked for.")


def _itl(numbers: Snapshot, around: Surroundings) -> Iterator[Finding]:
    pool: PoolNumbers = numbers.pools[Pool.INTERACTIVE]
    if pool.itl_p99 is None or pool.itl_p99 <= around.itl_target * _ITL_SLACK or pool.requests < _ENOUGH:
        return
    head = f"Interactive inter-token p99 is {time_text(pool.itl_p99)} (target {time_text(around.itl_target)})"
    host = sum(share for name, share in numbers.phases.items() if name != "run")
    if host > _HOST_SHARE:
        yield Finding("problem", f"{head}; {host:.0%} of the time goes to planning and delivery, not to the device.")
    elif numbers.preempted_per_s > 0.1:
        yield Finding("problem", f"{head}; requests lose their blocks and are read again. Give the cache more memory.")
    elif pool.itl_p50 is not None and pool.itl_p50 < around.itl_target:
        yield Finding(
            "problem", f"{head}, its median only {time_text(pool.itl_p50)}: chunks of prompts delay some steps."
        )
    elif numbers.running < 1.5:
        yield Finding("problem", f"{head} with one request at a time: this device needs that long for one token.")
    else:
        yield Finding(
            "problem",
            f"{head}: {numbers.running:.0f} requests a step are more than the device serves in that time. "
            "Lower engine.max_num_seqs.",
        )


def _device(numbers: Snapshot, around: Surroundings) -> Iterator[Finding]:
    if not numbers.steps_per_s:
        return
    if around.connections > 2 and numbers.running < 1.5 and not sum(around.waiting.values()):
        yield Finding(
            "note",
            f"{around.connections} connections are open, but {numbers.running:.1f} requests run on average: something "
            "in front of the server lets them through one by one.",
        )
    elif numbers.busy > 0.9 and numbers.utilization < _LOW_UTILIZATION:
        yield Finding(
            "note",
            f"The device is busy {numbers.busy:.0%} of the time at {numbers.utilization:.0%} of its peak: "
            f"{numbers.running:.1f} requests a step leave bandwidth unused. It can serve more at once.",
        )


def _cache(numbers: Snapshot, around: Surroundings) -> Iterator[Finding]:
    used = 1 - around.blocks_available / max(1, around.blocks_total)
    if numbers.preempted_per_s > 0.01:
        yield Finding(
            "problem" if numbers.preempted_per_s > 1 else "note",
            f"{numbers.preempted_per_s:.2f} requests a second lose their blocks; {used:.0%} of the KV cache is used.",
        )
    elif used > _KV_FULL:
        yield Finding("note", f"{used:.0%} of the KV cache is in use: the next long request will have to wait.")


def time_text(seconds: float) -> str:
    """For people: 1.23 s, or 4.5 ms."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
