"""From traces to numbers: percentiles, throughput, goodput. Pure; never one average.

Names follow vLLM's benchmark: TTFT, TPOT (mean per request), ITL (every gap between events), E2EL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from minserve.bench.client import RequestTrace

METRICS = ("ttft", "tpot", "itl", "e2el")


def percentile(values: Sequence[float], q: float) -> float:
    """Linear interpolation between the closest ranks; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    k = (len(ordered) - 1) * q / 100
    low = int(k)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (k - low)


def samples(traces: Sequence[RequestTrace]) -> dict[str, list[float]]:
    """Milliseconds per metric, of the requests that succeeded."""
    ok = [t for t in traces if t.ok]
    return {
        "ttft": [t.ttft * 1e3 for t in ok],
        "tpot": [t.tpot * 1e3 for t in ok if t.tpot is not None],
        "itl": [gap * 1e3 for t in ok for gap in t.gaps],
        "e2el": [t.e2e * 1e3 for t in ok],
    }


def meets(trace: RequestTrace, slo: Mapping[str, float]) -> bool:
    """Whether a request succeeded within every bound (ms). For `itl` its own p99 counts."""
    if not trace.ok:
        return False
    itl = percentile(trace.gaps, 99) * 1e3 if len(trace.times) > 1 else 0.0
    own = {"ttft": trace.ttft * 1e3, "tpot": (trace.tpot or 0.0) * 1e3, "itl": itl, "e2el": trace.e2e * 1e3}
    return all(own[name] <= bound for name, bound in slo.items())


def summarize(
    traces: Sequence[RequestTrace],
    *,
    wall: float,
    percentiles: Sequence[float],
    slo: Mapping[str, float],
    lag: Sequence[float],
) -> dict[str, Any]:
    """A JSON-ready summary. Rates are per second of wall time; *_ms are milliseconds."""
    ok = [t for t in traces if t.ok]
    output = sum(t.completion_tokens or len(t.times) for t in ok)
    prompt = sum(t.prompt_tokens for t in ok)
    errors: dict[str, int] = {}
    for t in traces:
        if not t.ok:
            reason = t.error or "no text"
            errors[reason] = errors.get(reason, 0) + 1
    out: dict[str, Any] = {
        "requests": len(traces),
        "completed": len(ok),
        "errors": errors,
        "duration_s": round(wall, 3),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "request_throughput": round(len(ok) / wall, 3),
        "output_throughput": round(output / wall, 2),
        "total_token_throughput": round((output + prompt) / wall, 2),
        "client_lag_p99_ms": round(percentile(lag, 99) * 1e3, 2) if lag else None,
    }
    if slo:
        good = sum(meets(t, slo) for t in traces)
        out |= {"goodput": round(good / wall, 3), "good_requests": good, "slo_ms": dict(slo)}
    for name, values in samples(traces).items():
        out[f"{name}_ms"] = {f"p{q:g}": round(percentile(values, q), 2) for q in percentiles} if values else None
    return out


def table(summary: Mapping[str, Any]) -> Table:
    """The same for people."""
    view = Table()
    view.add_column("milliseconds")
    names: list[str] = next((list(summary[f"{m}_ms"]) for m in METRICS if summary[f"{m}_ms"]), [])
    for name in names:
        view.add_column(name, justify="right")
    for metric in METRICS:
        row = summary[f"{metric}_ms"]
        if row:
            view.add_row(metric.upper(), *(f"{row[name]:.1f}" for name in names))
    return view
