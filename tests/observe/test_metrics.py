"""Prometheus metrics: names, live gauges, sums that agree with the bill."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from minserve.economics.rows import Row
from minserve.observe.gauges import Gauges
from minserve.observe.histogram import Histogram
from minserve.observe.metrics import Metrics
from minserve.request import FinishReason, Pool, Usage
from tests.observe.records import outcome, step


def row(**fields: Any) -> Row:
    return Row(**{"seq": 1, "time": 0.0, "id": "r", "pool": "interactive", "finish": "stop", **fields})


def samples(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """(name, values of further labels in the order of their names) -> value, as a scraper parses it."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "smol"
            found[sample.name, tuple(sample.labels.values())] = sample.value
    return found


def metrics(gauges: Gauges | None = None) -> Metrics:
    return Metrics("smol", lambda: gauges or Gauges({}, {}, 10, 10))


def test_every_name_that_dashboards_look_for_is_there() -> None:
    m = metrics(Gauges({Pool.BULK: 2}, {Pool.INTERACTIVE: 1}, 10, 4, waits={"seats": 1}))
    m.info = {"block_size": "16"}
    m.observe(step(ttfts=((Pool.INTERACTIVE, 0.1),), gaps=((Pool.BULK, 0.02),), prefix_queries=8, prefix_hits=4))
    m.observe(outcome())
    m.row(row(prompt_tokens=10, cached_tokens=4, completion_tokens=3, max_tokens=8, cost=2_000_000_000))
    m.row(row(finish="refused", code="budget_exceeded"))
    seen = samples(m)
    names = {name for name, _ in seen}
    histograms = (
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
        *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
        *("request_decode_time_seconds", "request_inference_time_seconds", "iteration_tokens_total"),
        *("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens", "request_params_n"),
        "request_num_preemptions",
    )
    for name in histograms:
        assert {f"vllm:{name}_bucket", f"vllm:{name}_sum", f"vllm:{name}_count"} <= names, name
    assert seen["vllm:num_requests_running", ("bulk",)] == 2
    assert seen["vllm:num_requests_running", ("interactive",)] == 0
    assert seen["vllm:num_requests_waiting", ("interactive",)] == 1
    assert seen["vllm:num_requests_waiting_by_reason", ("seats",)] == 1
    assert seen["vllm:kv_cache_usage_perc", ()] == 0.6
    assert seen["vllm:request_success_total", ("stop", "interactive")] == 1
    assert seen["vllm:admission_rejections_total", ("budget_exceeded",)] == 1
    assert seen["vllm:prompt_tokens_total", ("interactive",)] == 10
    assert seen["vllm:prompt_tokens_cached_total", ("interactive",)] == 4
    assert seen["vllm:generation_tokens_total", ("interactive",)] == 3
    assert seen["vllm:prefix_cache_queries_total", ()] == 8
    assert seen["vllm:prefix_cache_hits_total", ()] == 4
    assert seen["vllm:num_preemptions_total", ()] == 0
    assert seen["vllm:cache_config_info", ("16",)] == 1
    assert seen["minserve_cost_total", ("interactive",)] == 2
    assert seen["minserve_step_seconds_total", ("run",)] == 0.02


def test_aborted_calls_are_in_totals_and_per_call_metrics_alike() -> None:  # bug: 60
    m = metrics()
    for i in range(5):
        m.observe(outcome(finish=FinishReason.ABORT, usage=Usage(10, 0, i), ttft=0.1 if i else None, gaps=()))
        m.row(row(finish="abort", prompt_tokens=10, completion_tokens=i, max_tokens=8))
    m.observe(outcome())
    m.row(row(prompt_tokens=10, completion_tokens=3, max_tokens=8))
    seen = samples(m)
    pool = ("interactive",)
    assert seen["vllm:generation_tokens_total", pool] == seen["vllm:request_generation_tokens_sum", pool] == 13
    assert seen["vllm:prompt_tokens_total", pool] == seen["vllm:request_prompt_tokens_sum", pool] == 60
    assert seen["vllm:request_generation_tokens_count", pool] == 6
    assert seen["vllm:e2e_request_latency_seconds_count", pool] == 6
    ended = {labels[0]: value for (name, labels), value in seen.items() if name == "vllm:request_success_total"}
    assert ended == {"abort": 5, "stop": 1}


def test_gauges_are_read_when_scraped() -> None:  # bug: 61
    now = [Gauges({Pool.INTERACTIVE: 100}, {Pool.INTERACTIVE: 7}, 50, 0, waits={"blocks": 7})]
    m = Metrics("smol", lambda: now[0])
    assert samples(m)["vllm:num_requests_running", ("interactive",)] == 100
    now[0] = Gauges({}, {}, 50, 50)  # all abort at once; no step comes after that
    seen = samples(m)
    assert seen["vllm:num_requests_running", ("interactive",)] == 0
    assert seen["vllm:num_requests_waiting", ("interactive",)] == 0
    assert seen["vllm:kv_cache_usage_perc", ()] == 0
    assert ("vllm:num_requests_waiting_by_reason", ("blocks",)) not in seen


def test_refused_and_degraded_calls_are_visible_and_cost_no_tokens() -> None:
    m = metrics()
    m.row(row(finish="refused", code="loop_detected", asked_prompt=99))
    m.row(row(finish="static", degraded="static"))
    m.row(row(degraded="shrink", prompt_tokens=1, completion_tokens=1, max_tokens=4, choices=2))
    seen = samples(m)
    assert seen["minserve_degraded_requests_total", ("static",)] == 1
    assert seen["minserve_degraded_requests_total", ("shrink",)] == 1
    assert seen["vllm:prompt_tokens_total", ("interactive",)] == 1
    assert seen["vllm:request_params_n_sum", ()] == 2
    assert seen["vllm:request_params_max_tokens_sum", ("interactive",)] == 2


def test_a_plan_of_which_nothing_can_run_is_no_step() -> None:
    m = metrics()
    for tokens in (5, 0, 0):
        m.observe(step(decode_tokens=tokens, prefill_tokens=0))
    seen = samples(m)
    assert seen["minserve_steps_total", ()] == seen["vllm:iteration_tokens_total_count", ()] == 1


def test_failed_steps_and_extra_gauges_are_counted() -> None:
    m = metrics(Gauges({}, {}, 0, 0, extra={"minserve_streams": ("Open streams.", 3.0)}))
    m.observe(step(failed="MemoryError", preempted=2))
    seen = samples(m)
    assert seen["minserve_step_failures_total", ()] == 1
    assert seen["vllm:num_preemptions_total", ()] == 2
    assert seen["minserve_streams", ()] == 3
    assert seen["vllm:kv_cache_usage_perc", ()] == 0


def test_a_histogram_counts_into_the_first_bucket_that_holds_a_value() -> None:
    h = Histogram("x", "Text.", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 99.0):
        h.observe(value)
    buckets = {s.labels["le"]: s.value for s in h.collect().samples if s.name == "x_bucket"}
    assert buckets == {"1.0": 2, "2.0": 4, "+Inf": 5}
    assert (h.count(), h.sum()) == (5, 104.0)
    assert (h.count(("no",)), h.sum(("no",))) == (0, 0.0)


def test_a_step_of_64_gaps_costs_a_fraction_of_a_millisecond() -> None:
    m = metrics()
    record = step(gaps=((Pool.INTERACTIVE, 0.02),) * 64)
    best = min(_timed(lambda: m.observe(record)) for _ in range(50))
    assert best < 0.0005


def _timed(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
