"""Profiles: whole configurations for deployments of one kind, as defaults below file, environment and flags.

Owns the values; what each profile is for says `Config`. A value that equals the plain default is not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HOUR = 3600.0

PROFILES: Mapping[str, Mapping[str, Any]] = {
    "interactive": {
        "engine.max_num_seqs": 16,
        "engine.max_num_batched_tokens": 256,
        "engine.itl_target_ms": 25.0,
        "limits.max_tokens": 2048,
        "pools.interactive.token_share": 0.95,
        "pools.interactive.kv_share": 0.9,
        "pools.interactive.max_queue": 64,
        "pools.interactive.queue_timeout_s": 10.0,
        "pools.bulk.token_share": 0.05,
        "pools.bulk.kv_share": 0.1,
        "pools.bulk.max_num_seqs": 8,
        "timeouts.first_token_s": 90.0,
        "timeouts.total_s": 300.0,
        "degradation.enabled": True,
    },
    "balanced": {},
    "bulk": {
        "engine.max_num_seqs": 128,
        "engine.max_num_batched_tokens": 2048,
        "engine.itl_target_ms": 500.0,
        "local.pool": "bulk",
        "local.pools": ("interactive",),
        "pools.interactive.token_share": 0.2,
        "pools.interactive.kv_share": 0.3,
        "pools.bulk.token_share": 0.8,
        "pools.bulk.kv_share": 0.7,
        "pools.bulk.max_queue": 65_536,
        "pools.bulk.queue_timeout_s": 6 * _HOUR,
        "pools.bulk.token_gap_s": 2 * _HOUR,
        "pools.bulk.first_token_s": 7 * _HOUR,
        "pools.bulk.total_s": 24 * _HOUR,
    },
}
