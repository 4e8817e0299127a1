"""Tokenizing beside the event loop: turns, bounds, callers that leave."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from functools import partial

import pytest

from minserve.request import RequestError
from minserve.server.text_worker import TextWorker
from tests.server.serving import COMPLETION, Server


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


@pytest.fixture
async def worker(gate: threading.Event) -> AsyncIterator[TextWorker]:
    worker = TextWorker(max_queue=3, patience=0.05)
    yield worker
    gate.set()
    worker.close()


async def test_results_and_errors_come_back(worker: TextWorker) -> None:
    assert await worker.run("a", lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        await worker.run("a", lambda: 1 / 0)
    assert await worker.run("a", lambda: threading.current_thread().name.startswith("minserve-text"))


async def test_keys_take_turns(worker: TextWorker, gate: threading.Event) -> None:
    order: list[str] = []
    first = asyncio.create_task(worker.run("busy", gate.wait))
    await asyncio.sleep(0)
    jobs = [("busy", "b1"), ("busy", "b2"), ("other", "o1"), ("third", "t1"), ("other", "o2")]
    tasks = [asyncio.create_task(worker.run(key, partial(order.append, name))) for key, name in jobs]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(first, *tasks)
    assert order == ["b1", "o1", "t1", "b2", "o2"]


async def test_a_key_with_too_many_jobs_is_refused_and_others_are_not(
    worker: TextWorker, gate: threading.Event
) -> None:
    tasks = [asyncio.create_task(worker.run("a", gate.wait)) for _ in range(4)]
    await asyncio.sleep(0.06)
    with pytest.raises(RequestError) as caught:
        await worker.run("a", gate.wait)
    assert (caught.value.status, caught.value.code) == (503, "tokenizer_busy")
    other = asyncio.create_task(worker.run("b", lambda: "fine"))
    gate.set()
    assert await other == "fine"
    await asyncio.gather(*tasks)


async def test_a_burst_of_short_jobs_is_not_refused() -> None:
    worker = TextWorker()
    assert await asyncio.gather(*(worker.run("a", partial(int, i)) for i in range(500))) == list(range(500))
    worker.close()


async def test_a_job_whose_caller_left_never_runs(worker: TextWorker, gate: threading.Event) -> None:
    ran: list[str] = []
    first = asyncio.create_task(worker.run("a", gate.wait))
    left = asyncio.create_task(worker.run("a", lambda: ran.append("left")))
    stays = asyncio.create_task(worker.run("a", lambda: ran.append("stays")))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(first, stays)
    assert ran == ["stays"]


# bug: 68
async def test_endless_depth_is_the_callers_fault(worker: TextWorker) -> None:
    def deep() -> None:
        deep()

    with pytest.raises(RequestError) as caught:
        await worker.run("a", deep)
    assert caught.value.status == 400


async def test_closing_ends_those_who_wait(worker: TextWorker, gate: threading.Event) -> None:
    running = asyncio.create_task(worker.run("a", gate.wait))
    waiting = asyncio.create_task(worker.run("a", lambda: 1))
    await asyncio.sleep(0)
    worker.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    await running


async def test_a_slow_tokenizer_does_not_hold_up_health(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    tokenizer = server.services.model.tokenizer
    monkeypatch.setattr(type(tokenizer), "encode", lambda *_, **__: release.wait(10) and [72])
    slow = asyncio.create_task(server.post("/v1/completions", COMPLETION))
    await asyncio.sleep(0.05)
    started = time.monotonic()
    assert (await server.get("/health"))[0] == 200
    assert time.monotonic() - started < 1
    assert not slow.done()
    release.set()
    assert (await slow)[0] == 200


@pytest.mark.parametrize(("echo", "threads"), [(True, ["minserve-text_0"]), (False, [])])
async def test_token_ids_become_text_beside_the_loop_and_only_for_an_echo(
    server: Server, monkeypatch: pytest.MonkeyPatch, echo: bool, threads: list[str]
) -> None:
    seen: list[str] = []

    def decode(*_: object) -> str:
        seen.append(threading.current_thread().name)
        return "Hi"

    monkeypatch.setattr(type(server.services.model.tokenizer), "decode", decode)
    status, reply = await server.post("/v1/completions", {**COMPLETION, "prompt": [72, 105], "echo": echo})
    assert (status, reply["choices"][0]["text"]) == (200, "HiHello" if echo else "Hello")
    assert seen == threads
