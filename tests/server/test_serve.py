"""`minserve serve` as a process: what it prints, when it listens, how it ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from minserve.config import Config
from minserve.economics.accounting import Accounting
from minserve.economics.rows import Row
from minserve.server.site import PortInUse, address_of, bind, loading_app
from minserve.server.webhook import Webhook
from tests.server.serving import keyed

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are sent to a process of its own")

ROOT = Path(__file__).parents[2]
BODY: dict[str, Any] = {"prompt": "Hi", "max_tokens": 3000, "ignore_eos": True, "stream": True}


class Process:
    """A server process and the lines it prints."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def line(self, pattern: str) -> re.Match[str]:
        """Read up to a line that the pattern matches."""
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            while line := (await self.process.stdout.readline()).decode():
                self.lines.append(line)
                if match := re.search(pattern, line):
                    return match
        raise AssertionError("".join(self.lines))

    async def address(self) -> str:
        return (await self.line(r"Chat +(http://\S+)"))[1]

    async def hang_up(self) -> None:
        """Read no further, as a pipe's other end that has died."""
        self.process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    async def end(self, timeout: float = 20) -> int:
        assert self.process.stdout is not None
        async with asyncio.timeout(timeout):
            self.lines.append((await self.process.stdout.read()).decode())
            return await self.process.wait()


@asynccontextmanager
async def serve(folder: Path, *flags: str, model: str = "dummy:llama-tiny") -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "minserve", "serve", model, "--backend", "numpy", *flags),
        cwd=ROOT,
        env={**os.environ, "MINSERVE_DATA": str(folder), "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


# bug: 63
async def test_a_signal_drains_and_the_process_ends_well(tmp_path: Path) -> None:
    async with serve(tmp_path, "--port", "0", "--set", "timeouts.drain_s=0.5") as server, session() as http:
        address = await server.address()
        assert any("requests of" in line for line in server.lines)  # how much fits at once
        async with http.post(address + "/v1/completions", json=BODY) as response:
            await response.content.readuntil(b'"text"')
            server.process.send_signal(signal.SIGTERM)
            text = (await response.read()).decode()
        assert '"code":"shutting_down"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert await server.end() == 0
        assert "Stopping" in "".join(server.lines)
    # The ledger was flushed: a second server finds it, and the data folder free again.
    async with serve(tmp_path, "--port", "0") as server:
        await server.address()


async def test_what_runs_is_drained_though_nobody_reads_what_it_prints(tmp_path: Path) -> None:
    async with serve(tmp_path, "--port", "0") as server, session() as http:
        address = await server.address()
        async with http.post(address + "/v1/completions", json=BODY | {"max_tokens": 50}) as response:
            await response.content.readuntil(b'"text"')
            await server.hang_up()
            server.process.send_signal(signal.SIGTERM)
            assert '"finish_reason":"length"' in (await response.read()).decode()
        assert await server.process.wait() == 0


@pytest.mark.parametrize(("signals", "status"), [(1, 0), (2, 130)])
async def test_a_reader_of_its_lines_that_hangs_holds_nothing_up(tmp_path: Path, signals: int, status: int) -> None:
    async with serve(tmp_path, "--port", "0") as server, session() as http:
        url = await server.address() + "/v1/completions"
        named = {"user": "u" * 128, "metadata": {"feature": "f" * 128, "run_id": "r" * 128}}

        async def calls(count: int) -> None:
            for _ in range(count):
                async with http.post(url, json={"prompt": "Hi", "max_tokens": 1, **named}) as response:
                    assert response.status == 200

        await asyncio.gather(*(calls(50) for _ in range(8)))  # more than a pipe and buffers hold
        async with http.post(url, json=BODY | {"max_tokens": 50}) as response:
            await response.content.readuntil(b'"text"')
            for _ in range(signals):
                server.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.02)
            if signals == 1:
                assert '"finish_reason":"length"' in (await response.read()).decode()
        for _ in range(500):
            if server.process.returncode is not None:  # `wait` waits for the pipe too
                break
            await asyncio.sleep(0.02)
        assert server.process.returncode == status
        await server.hang_up()


# bug: 63
async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with serve(tmp_path, "--port", "0") as server, session() as http:
        address = await server.address()
        async with http.post(address + "/v1/completions", json=BODY) as response:
            await response.content.readuntil(b'"text"')
            server.process.send_signal(signal.SIGINT)
            await server.line("Stopping")
            server.process.send_signal(signal.SIGINT)
            assert await server.end(5) == 130
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as database:
        (row,) = database.execute("SELECT finish, code, prompt_tokens, completion_tokens FROM calls").fetchall()
    assert row[:2] == ("abort", "shutting_down")  # settled at what is known, not open
    assert row[2] > 0
    assert 0 < row[3] < BODY["max_tokens"]


COUNT = """
import gc, os, signal, sys
from minserve.cli import main
from minserve.server import serve

def ready(*_):
    with open(os.environ["COUNTED"], "w") as file:  # another thread prints meanwhile
        print(gc.get_freeze_count(), len(gc.get_objects()), file=file)
    os.kill(os.getpid(), signal.SIGTERM)

serve.say_ready = ready
sys.argv[1:] = ["serve", "dummy:llama-tiny", "--backend", "numpy", "--port", "0"]
main()
"""


def test_a_collection_does_not_look_at_what_stands_since_the_start(tmp_path: Path) -> None:
    counted = tmp_path / "counted"
    environment = {**os.environ, "MINSERVE_DATA": str(tmp_path), "PYTHONPATH": str(ROOT), "COUNTED": str(counted)}
    done = subprocess.run([sys.executable, "-c", COUNT], env=environment, capture_output=True, text=True, timeout=60)
    assert counted.exists(), f"{done.returncode}: {done.stdout + done.stderr}"
    frozen, watched = counted.read_text().split()
    assert int(frozen) > 50 * int(watched), done.stdout + done.stderr


# bug: 63
async def test_while_loading_probes_are_answered_and_a_signal_ends_it(tmp_path: Path) -> None:
    port = free_port()
    async with serve(tmp_path, "--port", str(port), model="dummy:smollm2-135m") as server, session() as http:
        await server.line("reading")
        assert await status(http, f"http://127.0.0.1:{port}/health") == 200
        assert await status(http, f"http://127.0.0.1:{port}/ready") == 503
        async with http.post(f"http://127.0.0.1:{port}/v1/completions", json=BODY) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "2")
            assert (await response.json())["error"]["code"] == "loading"
            assert response.headers["X-Request-ID"]
            assert response.headers["Server"] == "minserve"
        foreign = {"Host": "evil.example"}
        async with http.get(f"http://127.0.0.1:{port}/health", headers=foreign) as response:
            assert response.status == 403
        async with http.post(f"http://127.0.0.1:{port}/v1/completions", json=BODY, headers=foreign) as response:
            assert response.status == 403
        server.process.send_signal(signal.SIGTERM)
        assert await server.end(10) == 0
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as database:
        rows = database.execute("SELECT endpoint, user, finish, status, code FROM calls ORDER BY seq").fetchall()
    assert rows == [
        ("/v1/completions", "local", "refused", 503, "loading"),
        ("/v1/completions", "", "refused", 403, "host_not_allowed"),
    ]


async def test_while_loading_the_pages_need_no_key_either() -> None:
    config = Config(keys={"a": keyed("a", pool="bulk", pools=("bulk",))})
    rows: list[Row] = []
    accounting = Accounting(config, on_row=rows.append)
    async with TestClient(TestServer(loading_app(config.server, accounting))) as client:
        for path in ("/", "/static/app.js"):
            async with client.get(path) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (503, "loading")
        for key, status in (("a", 503), ("b", 401)):
            own = {"Authorization": f"Bearer {key}"}
            async with client.post("/v1/completions", json=BODY, headers=own) as response:
                assert response.status == status
        async with client.get("/v1/models") as response:
            assert response.status == 401
    assert [(row.code, row.key, row.pool) for row in rows] == [
        ("loading", "a", "bulk"),
        ("invalid_api_key", "", "interactive"),
    ]


async def test_a_port_in_use_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse):
            bind("127.0.0.1", port)
        async with serve(tmp_path, "--port", str(port)) as server:
            assert await server.end() == 1
    said = "".join(server.lines)
    assert f"Port {port} on 127.0.0.1 is in use" in said
    assert f"--port {port + 1}" in said
    assert "reading" not in said
    assert "Traceback" not in said


async def test_a_server_open_to_all_without_keys_warns(tmp_path: Path) -> None:
    async with serve(tmp_path, "--port", "0", "--host", "0.0.0.0") as server:
        await server.line("Warning +listening on all interfaces without API keys")


def test_an_address_that_can_not_be_had_names_the_setting() -> None:
    for host in ("no.such.host.invalid", "a..b", "192.0.2.1"):
        with pytest.raises(OSError, match=r"server\.host"):
            bind(host, 0)


def test_the_address_shown_is_the_one_that_was_bound() -> None:
    for host, shown in (("127.0.0.2", "127.0.0.2"), ("0.0.0.0", "127.0.0.1")):
        with bind(host, 0) as sock:
            assert address_of(sock).startswith(f"http://{shown}:")


async def test_a_model_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    async with serve(tmp_path, "--port", "0", model=str(tmp_path / "missing.gguf")) as server:
        assert await server.end() == 1
    assert "Traceback" not in "".join(server.lines)


async def test_an_alert_is_posted_to_the_webhook_and_a_refusal_raises() -> None:
    from aiohttp import web

    got: list[Any] = []

    async def take(request: web.Request) -> web.Response:
        got.append(await request.json())
        return web.Response(status=200 if len(got) == 1 else 500)

    app = web.Application()
    app.router.add_post("/alert", take)
    runner = web.AppRunner(app)
    await runner.setup()
    sock = bind("127.0.0.1", 0)
    await web.SockSite(runner, sock).start()
    webhook = Webhook(f"http://127.0.0.1:{sock.getsockname()[1]}/alert")
    await webhook({"kind": "spend", "message": "80 %"})
    assert got == [{"kind": "spend", "message": "80 %"}]
    with pytest.raises(aiohttp.ClientResponseError):
        await webhook({"kind": "spend"})
    await webhook.close()
    await runner.cleanup()


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))


async def status(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(url) as response:
        return response.status


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
