"""minserve doctor and warmup."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from minserve.request import Pool
from tests.commands.conftest import Invoke
from tests.observe.records import outcome, step
from tests.server.serving import COMPLETION, keyed, serving


async def test_a_server_that_does_nothing_is_well(invoke: Invoke) -> None:
    async with serving() as server:
        result = await asyncio.to_thread(invoke, "doctor", "--url", server.url + "/")
        raw = await asyncio.to_thread(invoke, "doctor", "--url", server.url, "--json")
    assert result.exit_code == 0, result.output
    assert "tiny, minserve" in result.stdout
    assert "interactive" in result.stdout
    assert "Nothing has run in the last minute." in result.stdout
    assert json.loads(raw.stdout)["model"] == "tiny"


async def test_a_problem_is_said_and_is_the_exit_status(invoke: Invoke) -> None:
    slow = step(ttfts=((Pool.INTERACTIVE, 0.02),) * 10, gaps=((Pool.INTERACTIVE, 0.5),) * 10)
    async with serving() as server:
        server.services.telemetry.numbers.observe(slow)
        result = await asyncio.to_thread(invoke, "doctor", "--url", server.url)
    assert result.exit_code == 1
    assert "problem Interactive inter-token p99" in result.stdout


async def test_a_queue_that_has_just_emptied_is_still_the_cause(invoke: Invoke) -> None:
    async with serving() as server:
        numbers = server.services.telemetry.numbers
        numbers.observe(step(ttfts=((Pool.INTERACTIVE, 3.0),) * 10))
        for _ in range(10):
            numbers.observe(outcome(queue=2.9))
        result = await asyncio.to_thread(invoke, "doctor", "--url", server.url)
    assert "problem Interactive TTFT p99" in result.stdout
    assert "and requests queue" in result.stdout


async def test_where_keys_are_needed_it_says_which(invoke: Invoke) -> None:
    async with serving(keys={"ann": keyed("ms-1", admin=True), "bob": keyed("ms-2")}) as server:
        await server.post("/v1/completions", COMPLETION, headers={"Authorization": "Bearer ms-1"})
        for key, code in (("ms-1", 0), ("ms-2", 2), (None, 2)):
            arguments = ["doctor", "--url", server.url, *(["--api-key", key] if key else [])]
            result = await asyncio.to_thread(invoke, *arguments)
            assert result.exit_code == code, result.output
            assert ("--api-key" in result.stderr) is (code == 2)


async def test_a_server_of_something_else_is_one_sentence(invoke: Invoke) -> None:
    def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        result = await asyncio.to_thread(invoke, "doctor", "--url", url)
    assert (result.exit_code, result.stderr) == (2, f"minserve: {url} does not speak HTTP\n")


def test_no_server_is_one_sentence(invoke: Invoke) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = invoke("doctor", "--set", f"server.port={port}")
    assert result.exit_code == 2
    assert f"http://127.0.0.1:{port}" in result.stderr
    assert "Traceback" not in result.output


def test_warming_up_runs_the_model(invoke: Invoke) -> None:
    result = invoke("warmup", "dummy", "--backend", "numpy", "--num-blocks", "16")
    assert result.exit_code == 0, result.output
    assert "dummy on NumPy" in result.stdout
    assert "first steps in" in result.stdout


@pytest.mark.parametrize("model", ["dummy:none", "./no/such/folder"])
def test_warming_up_what_is_not_there_fails_with_a_sentence(invoke: Invoke, model: str) -> None:
    result = invoke("warmup", model)
    assert result.exit_code == 1
    assert "Traceback" not in result.output
