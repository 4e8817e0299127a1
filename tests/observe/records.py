"""Step records and outcomes with unremarkable values, for tests that care about a few of them."""

from __future__ import annotations

from typing import Any

from minserve.request import FinishReason, Pool, RequestOutcome, StepRecord, Usage


def step(**fields: Any) -> StepRecord:
    base: dict[str, Any] = {
        "step": 1,
        "started": 0.0,
        "plan": 0.001,
        "build": 0.002,
        "run": 0.02,
        "commit": 0.003,
        "deliver": 0.004,
        "ideal": 0.01,
        "decode_tokens": 3,
        "prefill_tokens": 13,
        "running": {},
        "waiting": {},
        "waits": {},
        "preempted": 0,
        "blocks_total": 10,
        "blocks_free": 10,
        "blocks_cached": 0,
    }
    return StepRecord(**{**base, **fields})


def outcome(**fields: Any) -> RequestOutcome:
    base: dict[str, Any] = {
        "id": "r#0",
        "group": "r",
        "pool": Pool.INTERACTIVE,
        "usage": Usage(10, 4, 3),
        "max_tokens": 8,
        "finish": FinishReason.STOP,
        "error_code": None,
        "arrival": 0.0,
        "queue": 0.1,
        "ttft": 0.3,
        "total": 1.0,
        "gaps": (0.2, 0.3),
        "preemptions": 0,
    }
    return RequestOutcome(**{**base, **fields})
