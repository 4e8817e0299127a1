"""Prometheus metrics: vLLM's names where the meaning is the same, `minserve_` for the rest.

Owns its registry. Fed by `observe` (an engine's observer) and `row` (a finished row of the ledger); what is read live
when scraped is `gauges.py`'s. It must not know the engine.

Totals of tokens and the histograms of tokens per call are counted from the same ledger row when a call ends, aborted
ones too: totals, histograms and bills agree. Latencies come from the engine's outcomes, one per choice. What flows now
is in `vllm:iteration_tokens_total`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import InfoMetricFamily, Metric

from minserve.observe.gauges import Gauges, families
from minserve.observe.histogram import Histogram
from minserve.request import PHASES, Pool, RequestOutcome, StepRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# vLLM's buckets, finer at the lower end: a small model on a GPU makes a token in less than a millisecond.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKEN_BUCKETS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
STEP_BUCKETS = (1.0, *(float(2**e) for e in range(3, 15)))
CHOICE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTION_BUCKETS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


class LedgerRow(Protocol):
    """The columns of a ledger row that become metrics. Money in billionths."""

    pool: str
    finish: str
    code: str
    cost: int
    choices: int
    max_tokens: int
    degraded: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Metrics:
    def __init__(self, model: str, gauges: Callable[[], Gauges]) -> None:
        """model: the label `model_name`. gauges: asked when scraped."""
        self.registry = CollectorRegistry()
        self._model = (("model_name", model),)
        self._gauges = gauges
        self.info: Mapping[str, str] = {}  # the cache's configuration, for `vllm:cache_config_info`
        self._histograms: list[Histogram] = []
        self._define_steps()
        self._define_requests()
        self.registry.register(_Collector(self._collect))

    def render(self) -> bytes:
        """The page of `/metrics`, text format 0.0.4."""
        return generate_latest(self.registry)

    def observe(self, record: StepRecord | RequestOutcome) -> None:
        """The engine's observer: one call a step, one a request's end."""
        if isinstance(record, StepRecord):
            self._step(record)
        else:
            self._outcome(record)

    def row(self, row: LedgerRow) -> None:
        """A call has ended or was refused: its tokens and money, why it was refused, what was degraded."""
        for rung in filter(None, row.degraded.split(",")):
            self.degraded.labels(*self._values(rung)).inc()
        if row.finish == "refused":
            self.rejections.labels(*self._values(row.code)).inc()
            return
        if row.finish == "static":
            return
        pool = row.pool
        for key, value in (("prompt", row.prompt_tokens), ("generation", row.completion_tokens)):
            self.calls[key].observe(value, (pool,))
        self.calls["max_tokens"].observe(row.max_tokens / row.choices, (pool,))
        self.choices.observe(row.choices)
        self.prompt_tokens[pool].inc(row.prompt_tokens)
        self.cached_tokens[pool].inc(row.cached_tokens)
        self.generation_tokens[pool].inc(row.completion_tokens)
        self.cost[pool].inc(row.cost / 1e9)

    # -- definitions

    def _define_steps(self) -> None:
        self.ttft = self._histogram("vllm:time_to_first_token_seconds", "Time to first token.", TTFT_BUCKETS)
        self.itl = self._histogram("vllm:inter_token_latency_seconds", "Gap between two tokens.", ITL_BUCKETS)
        self.iteration = self._histogram("vllm:iteration_tokens_total", "Tokens of a step.", STEP_BUCKETS, pool=False)
        self.preemptions = self._counter("vllm:num_preemptions", "Requests that lost their blocks for a while.")
        self.prefix_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found there.")
        self.steps = self._counter("minserve_steps", "Steps of the engine.")
        self.failures = self._counter("minserve_step_failures", "Steps that failed.")
        self.ideal = self._counter(
            "minserve_ideal_seconds", "Time the steps' work takes at the device's measured peaks."
        )
        phases = self._counter("minserve_step_seconds", "Time of steps, by part.", "phase")
        self.phases = {phase: phases.labels(*self._values(phase)) for phase in PHASES}

    def _define_requests(self) -> None:
        per_request = (
            ("e2e", "vllm:e2e_request_latency_seconds", "Arrival to end.", LATENCY_BUCKETS),
            ("queue", "vllm:request_queue_time_seconds", "Arrival to first step.", LATENCY_BUCKETS),
            ("prefill", "vllm:request_prefill_time_seconds", "First step to first token.", LATENCY_BUCKETS),
            ("decode", "vllm:request_decode_time_seconds", "First token to end.", LATENCY_BUCKETS),
            ("inference", "vllm:request_inference_time_seconds", "First step to end.", LATENCY_BUCKETS),
            ("tpot", "vllm:request_time_per_output_token_seconds", "Mean gap of a request.", ITL_BUCKETS),
            ("preemptions", "vllm:request_num_preemptions", "Preemptions of a request.", PREEMPTION_BUCKETS),
        )
        per_call = (
            ("prompt", "vllm:request_prompt_tokens", "Prompt tokens processed.", TOKEN_BUCKETS),
            ("generation", "vllm:request_generation_tokens", "Tokens generated.", TOKEN_BUCKETS),
            ("max_tokens", "vllm:request_params_max_tokens", "Tokens asked for, per choice.", TOKEN_BUCKETS),
        )
        self.requests = {key: self._histogram(name, text, bounds) for key, name, text, bounds in per_request}
        self.calls = {key: self._histogram(name, text, bounds) for key, name, text, bounds in per_call}
        self.choices = self._histogram("vllm:request_params_n", "Choices asked for.", CHOICE_BUCKETS, pool=False)
        self.success = self._counter("vllm:request_success", "Requests that ended.", "pool", "finished_reason")
        self.prompt_tokens = self._by_pool("vllm:prompt_tokens", "Prompt tokens processed.")
        self.cached_tokens = self._by_pool("vllm:prompt_tokens_cached", "Of these, found in the prefix cache.")
        self.generation_tokens = self._by_pool("vllm:generation_tokens", "Tokens generated.")
        self.rejections = self._counter("vllm:admission_rejections", "Refused calls.", "reason")
        self.cost = self._by_pool("minserve_cost", "Money settled, in the configured currency.")
        self.degraded = self._counter("minserve_degraded_requests", "Calls that got less under load.", "rung")

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...], pool: bool = True) -> Histogram:
        histogram = Histogram(name, text, bounds, ("pool",) if pool else ())
        self._histograms.append(histogram)
        return histogram

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        """Counter names gain `_total`, as vLLM's do. One without further labels is shown as 0 from the start."""
        counter = Counter(name, text, ("model_name", *labels), registry=self.registry)
        return counter if labels else counter.labels(*self._values())

    def _by_pool(self, name: str, text: str) -> dict[str, Counter]:
        counter = self._counter(name, text, "pool")
        return {pool.value: counter.labels(*self._values(pool.value)) for pool in Pool}

    def _values(self, *labels: str) -> tuple[str, ...]:
        return self._model[0][1], *labels

    # -- events

    def _step(self, record: StepRecord) -> None:
        for pool, seconds in record.ttfts:
            self.ttft.observe(seconds, (pool.value,))
        # Who got a token in this step and in the one before has the same gap, to the bit: most of them.
        for (pool, seconds), count in collections.Counter(record.gaps).items():
            self.itl.observe(seconds, (pool.value,), count)
        if record.tokens:
            self.iteration.observe(record.tokens)
            self.steps.inc()
        self.ideal.inc(record.ideal)
        for phase, counter in self.phases.items():
            counter.inc(getattr(record, phase))
        self.preemptions.inc(record.preempted)
        self.prefix_queries.inc(record.prefix_queries)
        self.prefix_hits.inc(record.prefix_hits)
        if record.failed is not None:
            self.failures.inc()

    def _outcome(self, outcome: RequestOutcome) -> None:
        pool = (outcome.pool.value,)
        seen = self.requests
        seen["e2e"].observe(outcome.total, pool)
        seen["queue"].observe(outcome.queue, pool)
        seen["preemptions"].observe(outcome.preemptions, pool)
        if outcome.ttft is not None:
            seen["prefill"].observe(outcome.ttft - outcome.queue, pool)
            seen["decode"].observe(outcome.total - outcome.ttft, pool)
            seen["inference"].observe(outcome.total - outcome.queue, pool)
        if outcome.gaps:
            seen["tpot"].observe(sum(outcome.gaps) / len(outcome.gaps), pool)
        self.success.labels(*self._values(*pool, outcome.finish.value)).inc()

    # -- scrape

    def _collect(self) -> Iterator[Metric]:
        for histogram in self._histograms:
            yield histogram.collect(self._model)
        yield from families(self._gauges(), self._model[0][1])
        if self.info:
            info = InfoMetricFamily("vllm:cache_config", "Configuration of the KV cache.", labels=["model_name"])
            info.add_metric(self._values(), dict(self.info))
            yield info


class _Collector:
    """What prometheus_client asks when it renders."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self.collect = collect
