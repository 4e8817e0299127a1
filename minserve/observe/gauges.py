"""Metrics that no event feeds: what is true at the moment of a scrape, so that it can't freeze when nothing happens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from minserve.request import Pool, WaitReason


@dataclass(frozen=True, slots=True)
class Gauges:
    """Counts of requests per pool and of KV blocks, now.

    blocks_available: those that nobody holds, cached ones included.
    extra: further gauges and, named *_total, counters: name -> (meaning, value).
    """

    running: Mapping[Pool, int]
    waiting: Mapping[Pool, int]
    blocks_total: int
    blocks_available: int
    blocks_cached: int = 0
    waits: Mapping[WaitReason, int] = field(default_factory=dict)
    extra: Mapping[str, tuple[str, float]] = field(default_factory=dict)


def families(now: Gauges, model: str) -> Iterator[Metric]:
    """In prometheus_client's form. model: the label `model_name`."""
    by_pool = (
        ("vllm:num_requests_running", "Requests that hold a seat.", now.running),
        ("vllm:num_requests_waiting", "Requests that wait for one.", now.waiting),
    )
    for name, text, counts in by_pool:
        requests = GaugeMetricFamily(name, text, labels=["model_name", "pool"])
        for pool in Pool:
            requests.add_metric((model, pool.value), counts.get(pool, 0))
        yield requests
    waits = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason", "Why requests wait.", labels=["model_name", "reason"]
    )
    for reason, count in now.waits.items():
        waits.add_metric((model, reason), count)
    yield waits
    used = (now.blocks_total - now.blocks_available) / max(1, now.blocks_total)
    single = {
        "vllm:kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1.", used),
        "minserve_kv_blocks_cached": ("Available KV blocks that hold a known prefix.", now.blocks_cached),
        **now.extra,
    }
    for name, (text, value) in single.items():
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(name, text, labels=["model_name"])
        family.add_metric((model,), value)
        yield family
