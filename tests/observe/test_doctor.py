"""Which number points where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from minserve.observe.doctor import Surroundings, diagnose
from minserve.observe.numbers import PoolNumbers, Snapshot
from minserve.request import Pool

FAST = PoolNumbers(ttft_p50=0.1, ttft_p99=0.2, itl_p50=0.01, itl_p99=0.02, queue_p50=0.01, requests=10)
CALM = Snapshot(
    window=60.0,
    pools={Pool.INTERACTIVE: FAST, Pool.BULK: FAST},
    utilization=0.5,
    busy=0.8,
    running=4.0,
    waiting=0.0,
    prefill_tokens_per_s=100.0,
    decode_tokens_per_s=100.0,
    steps_per_s=20.0,
    preempted_per_s=0.0,
    prefix_hit_share=0.5,
    phases={"plan": 0.01, "build": 0.01, "run": 0.8, "commit": 0.01, "deliver": 0.01},
)
AROUND = Surroundings(
    itl_target=0.04, ttft_target=1.0, seats=8, blocks_total=100, blocks_available=50, waiting={}, waits={}
)


def slow(**fields: Any) -> dict[Pool, PoolNumbers]:
    return {Pool.INTERACTIVE: replace(FAST, **fields), Pool.BULK: FAST}


@pytest.mark.parametrize(
    ("numbers", "around", "weight", "words"),
    [
        ({}, {}, "good", "within their targets"),
        ({"steps_per_s": 0.0}, {}, "good", "Nothing has run"),
        (
            {"pools": slow(ttft_p99=3.0)},
            {"waiting": {Pool.INTERACTIVE: 5}, "waits": {"seats": 4, "blocks": 1}},
            "problem",
            "all 8 seats are taken",
        ),
        ({"pools": slow(ttft_p99=3.0)}, {"waiting": {Pool.INTERACTIVE: 5}}, "problem", "more work comes"),
        ({"pools": slow(ttft_p99=3.0)}, {}, "problem", "the time goes into reading prompts"),
        ({"pools": slow(ttft_p99=3.0, queue_p50=0.09)}, {}, "problem", "requests queue"),
        ({"pools": slow(itl_p99=0.2)}, {}, "problem", "chunks of prompts delay some steps"),
        ({"pools": slow(itl_p50=0.1, itl_p99=0.2)}, {}, "problem", "Lower engine.max_num_seqs"),
        ({"pools": slow(itl_p99=0.2), "phases": {"run": 0.5, "deliver": 0.3}}, {}, "problem", "30% of the time"),
        ({"pools": slow(itl_p99=0.2), "preempted_per_s": 0.5}, {}, "problem", "requests lose their blocks"),
        ({"running": 1.0}, {"connections": 12}, "note", "one by one"),
        ({"busy": 0.99, "utilization": 0.1}, {}, "note", "It can serve more at once"),
        ({"preempted_per_s": 2.0}, {}, "problem", "lose their blocks"),
        ({}, {"blocks_available": 3}, "note", "97% of the KV cache"),
    ],
)
def test_each_pattern_is_named(numbers: dict[str, Any], around: dict[str, Any], weight: str, words: str) -> None:
    findings = diagnose(replace(CALM, **numbers), replace(AROUND, **around))
    assert [f for f in findings if f.weight == weight and words in f.text], findings


def test_problems_come_first() -> None:
    numbers = replace(CALM, pools=slow(ttft_p99=3.0), busy=0.99, utilization=0.1)
    assert [f.weight for f in diagnose(numbers, AROUND)] == ["problem", "note"]


def test_a_handful_of_requests_proves_nothing_about_a_p99() -> None:
    few = replace(CALM, pools=slow(ttft_p99=3.0, itl_p99=0.5, requests=3))
    (finding,) = diagnose(few, AROUND)
    assert (finding.weight, "3 requests are too few" in finding.text) == ("good", True)
