"""Closed loop (a fixed number of clients) and open loop (requests arrive whether or not the server keeps up).

Owns the sending of one benchmark. The open loop draws gaps from a gamma distribution: burstiness 1 is Poisson, as in
vLLM's benchmark. Latencies count from when a request was due, so a slow client can't hide a slow server.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from minserve.bench.client import Lag, RequestTrace, Target, send
from minserve.bench.report import summarize


@dataclass(frozen=True, slots=True)
class Plan:
    """How requests are sent. request_rate inf: as fast as max_concurrency allows (closed loop)."""

    request_rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None
    warmups: int = 1
    seed: int = 0
    timeout: float = 600.0


async def run(
    target: Target,
    prompts: Sequence[str],
    plan: Plan,
    *,
    percentiles: Sequence[float] = (50, 90, 99),
    slo: dict[str, float] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[dict[str, Any], list[RequestTrace]]:
    """Send every prompt once; the summary and the raw traces."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=plan.timeout)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
        for i in range(plan.warmups):
            await send(session, target, f"Warm up number {i} {plan.seed}.")
        async with Lag() as lag:
            started = time.perf_counter()
            traces = await _send_all(session, target, prompts, plan, progress)
            wall = time.perf_counter() - started
    return summarize(traces, wall=wall, percentiles=percentiles, slo=slo or {}, lag=lag.samples), traces


async def _send_all(
    session: aiohttp.ClientSession, target: Target, prompts: Sequence[str], plan: Plan, progress: Callable[[int], None]
) -> list[RequestTrace]:
    gate = asyncio.Semaphore(plan.max_concurrency or len(prompts))
    finished = 0

    async def one(prompt: str, due: float | None) -> RequestTrace:
        nonlocal finished
        async with gate:
            trace = await send(session, target, prompt, due)
        finished += 1
        progress(finished)
        return trace

    rng = random.Random(plan.seed)
    due = time.perf_counter()
    tasks = []
    for prompt in prompts:
        if plan.request_rate == float("inf"):
            tasks.append(asyncio.create_task(one(prompt, None)))
            continue
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(prompt, due)))
        due += rng.gammavariate(plan.burstiness, 1 / (plan.request_rate * plan.burstiness))
    return list(await asyncio.gather(*tasks))
