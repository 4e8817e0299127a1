"""The load generator against a stub that streams at known times: what it counts and what it reports."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from minserve.bench.client import RequestTrace, Target
from minserve.bench.report import meets, percentile, summarize
from minserve.bench.run import Plan, run
from minserve.bench.workload import cut_by_characters, prompts


async def stream(request: web.Request) -> web.StreamResponse:
    """Two tokens in one event, then one, then usage: three tokens in two events. With ids, another one without text."""
    body = await request.json()
    if "refuse" in body["prompt"]:
        return web.json_response({"error": {"message": "no"}}, status=503)
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for text in ("one two", " three", *([""] if "return_token_ids" in body else [])):
        await asyncio.sleep(0.02)
        ids = {"token_ids": [1]} if "return_token_ids" in body else {}
        event = {"choices": [{"index": 0, "text": text, **ids}], "usage": None}
        await response.write(b": keep-alive\n\ndata: " + json.dumps(event).encode() + b"\n\n")
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
    await response.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
    return response


@pytest.fixture
async def url() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", stream)
    async with TestServer(app) as server:
        yield str(server.make_url("/v1/completions"))


async def test_tokens_are_counted_by_usage_not_by_events(url: str) -> None:
    summary, traces = await run(Target(url, False, {}, {}), ["a", "b"], Plan(max_concurrency=1, warmups=0))
    assert summary["output_tokens"] == 6
    assert summary["prompt_tokens"] == 14
    assert all(t.text == "one two three" and len(t.times) == 2 for t in traces)
    assert summary["ttft_ms"]["p50"] >= 15
    # one gap of 20 ms, but two tokens came after the first event's: tpot counts all three by usage
    assert traces[0].tpot == pytest.approx((traces[0].times[1] - traces[0].times[0]) / 2)
    assert summary["client_lag_p99_ms"] is not None


async def test_a_token_within_a_character_is_seen_where_ids_are_asked_for(url: str) -> None:
    target = Target(url, False, {"return_token_ids": True}, {})
    _, (trace,) = await run(target, ["a"], Plan(max_concurrency=1, warmups=0))
    assert (trace.text, len(trace.times)) == ("one two three", 3)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_thinking_is_output_too(field: str) -> None:
    async def thinker(request: web.Request) -> web.Response:
        deltas = ({"role": "assistant", "content": ""}, {field: "hm"}, {"content": "Yes"})
        events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return web.Response(text=text + "data: [DONE]\n\n", content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/chat", thinker)
    async with TestServer(app) as server:
        target = Target(str(server.make_url("/chat")), True, {}, {})
        _, (trace,) = await run(target, ["a"], Plan(warmups=0))
    assert (trace.text, len(trace.times)) == ("hmYes", 2)


async def test_a_closed_loop_never_has_more_requests_than_clients(url: str) -> None:
    _, traces = await run(Target(url, False, {}, {}), ["a"] * 6, Plan(max_concurrency=2, warmups=0))
    spans = [(t.sent, t.done) for t in traces]
    assert max(sum(s < end and e > start for s, e in spans) for start, end in spans) <= 3  # touching ends count


async def test_an_open_loop_counts_from_when_a_request_was_due(url: str) -> None:
    plan = Plan(request_rate=200, max_concurrency=1, warmups=0, seed=1)
    _, traces = await run(Target(url, False, {}, {}), ["a"] * 5, plan)
    assert traces[-1].sent > traces[-1].due + 0.02  # it waited for its turn, and the wait is in its TTFT
    assert traces[-1].ttft > traces[-1].times[0] - traces[-1].sent


async def test_refusals_are_reported_and_not_counted_as_speed(url: str) -> None:
    summary, _ = await run(Target(url, False, {}, {}), ["refuse", "a"], Plan(warmups=0))
    assert summary["completed"] == 1
    assert next(iter(summary["errors"])).startswith("HTTP 503")


def test_goodput_needs_every_bound_to_hold() -> None:
    trace = RequestTrace(due=0.0, sent=0.0, done=1.0, times=[0.5, 0.52, 0.9], completion_tokens=3)
    assert meets(trace, {"ttft": 600, "itl": 400})
    assert not meets(trace, {"ttft": 600, "itl": 300})
    assert not meets(trace, {"ttft": 400})
    assert not meets(RequestTrace(due=0.0, error="HTTP 503"), {"ttft": 1e9})
    summary = summarize([trace], wall=2.0, percentiles=[50], slo={"ttft": 600}, lag=[])
    assert (summary["goodput"], summary["good_requests"]) == (0.5, 1)


@pytest.mark.parametrize(("q", "value"), [(0, 1.0), (50, 2.5), (100, 4.0), (99, 3.97)])
def test_percentiles_interpolate(q: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], q) == pytest.approx(value)


def test_prompts_differ_except_for_the_shared_start() -> None:
    texts = prompts(8, 100, shared_tokens=40, seed=3, cut=cut_by_characters)
    shared = cut_by_characters(texts[0], 40)
    assert all(t.startswith(shared) for t in texts)
    rest = {t[len(shared) + 2 : len(shared) + 32] for t in texts}
    assert len(rest) == 8
    assert texts == prompts(8, 100, shared_tokens=40, seed=3, cut=cut_by_characters)
    assert texts != prompts(8, 100, shared_tokens=40, seed=4, cut=cut_by_characters)
