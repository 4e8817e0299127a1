"""What the experiments in this folder share: a server in a folder of its own, and JSON at the end.

A `Server` is a real process (`minserve serve` on a free port) with its own configuration and data, so that it can be
killed and started again on what it left behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the experiments look into what the server left, with the server's own readers

from minserve.economics.settlement import rank


class Server:
    """config: minserve.toml. The model and further flags are given to `serve`. Use as a context manager."""

    def __init__(self, config: str, model: str, flags: Sequence[str] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="minserve-experiment-")
        self.data = Path(self._folder.name)
        (self.data / "minserve.toml").write_text(config, encoding="utf-8")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self._port}"
        self._command = [sys.executable, "-m", "minserve", "serve", model, "--port", str(self._port), *flags]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.stop()
        self._folder.cleanup()

    async def start(self) -> None:
        """Start it on the data that is there, and wait until it is ready. RuntimeError if it ends instead."""
        process = self._spawn()
        async with aiohttp.ClientSession() as session:
            for _ in range(6000):
                if process.poll() is not None:
                    raise RuntimeError("the server ended while starting")
                try:
                    async with session.get(self.url + "/ready") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)
        raise RuntimeError("the server was not ready within five minutes")

    def _spawn(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "MINSERVE_DATA": str(self.data),
            "MINSERVE_CONFIG": str(self.data / "minserve.toml"),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        self._process = subprocess.Popen(
            [*self._command, "--log-level", "error"], env=environment, stdout=subprocess.DEVNULL
        )
        return self._process

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """At once, as the kernel does when memory is short."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def stop(self) -> int:
        """As an operator does; the exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(60)
        finally:
            self._process.kill()
            self._process = None


def client() -> aiohttp.ClientSession:
    """As many connections as asked for, none kept: a queue in the client would look like one in the server."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600))


def quantile(values: Sequence[float], q: float) -> float:
    """Nearest rank; 0 of nothing."""
    return rank(sorted(values), q) if values else 0.0


def report(result: dict[str, Any], faults: Sequence[str]) -> int:
    """Print the result as one line of JSON and each missed bound on standard error; the exit status."""
    print(json.dumps(result | {"ok": not faults}))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0
