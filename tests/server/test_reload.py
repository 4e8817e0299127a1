"""SIGHUP: what changes, what is refused, and what the log says of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest

from minserve.config import Config, EngineConfig, LimitConfig, LimitsConfig, PricesConfig, ServerConfig
from minserve.server.reload import changes, reload, reload_on
from minserve.settings import SettingsError
from tests.server.serving import CHAT, COMPLETION, keyed, serving

ANN = {"Authorization": "Bearer ms-ann"}
BOB = {"Authorization": "Bearer ms-bob"}


async def test_keys_and_limits_change_between_two_calls(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first = Config(keys={"ann": keyed("ms-ann")})
    second = Config(
        keys={
            "ann": keyed("ms-ann", limits=(LimitConfig(period="day", requests=1),)),
            "bob": keyed("ms-bob", user="bob"),
        },
        limits=LimitsConfig(max_tokens=3, default_max_tokens=3, default_completion_tokens=3, max_body_bytes=1),
        server=ServerConfig(port=1),
    )
    async with serving(keys=first.keys) as server:
        assert (await server.post("/v1/completions", COMPLETION, headers=BOB))[0] == 401
        await reload(server.services, lambda: second, first)
        status, body = await server.post("/v1/completions", COMPLETION, headers=BOB)
        assert (status, body["usage"]["completion_tokens"]) == (200, 3)
        assert [(await server.post("/v1/chat/completions", CHAT, headers=ANN))[0] for _ in range(2)] == [200, 429]
    text = caplog.text
    assert "keys.bob added" in text
    assert "limits.max_tokens 4096 -> 3" in text
    assert "wait for a restart: limits.max_body_bytes 8388608 -> 1; server.port 8000 -> 1" in text
    assert keyed("ms-bob").sha256 not in text


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (SettingsError("minserve.toml: keys: unknown"), "minserve.toml: keys: unknown"),
        (Config(keys={"bob": msgspec.structs.replace(keyed("ms-bob"), sha256="short")}), "64 hexadecimal digits"),
        (Config(prices=PricesConfig(decode=1e6)), r"prices\.decode"),
        (Config(limits=LimitsConfig(max_tokens=1)), r"default_max_tokens"),
    ],
)
async def test_a_wrong_file_changes_nothing(
    wrong: Config | SettingsError, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def read() -> Config:
        if isinstance(wrong, Config):
            return wrong
        raise wrong

    first = Config(keys={"ann": keyed("ms-ann")})
    async with serving(keys=first.keys) as server:
        await reload(server.services, read, first)
        assert server.services.config == first
        assert (await server.post("/v1/completions", COMPLETION, headers=ANN))[0] == 200
    assert re.search(reason, caplog.text)
    assert "the old one stays" in caplog.text


async def test_reloads_come_one_after_the_other() -> None:
    hangup, count = asyncio.Event(), 0

    def read() -> Config:
        nonlocal count
        count += 1
        return Config()

    async with serving() as server:
        task = asyncio.create_task(reload_on(hangup, server.services, read))
        for n in (1, 2):
            hangup.set()
            for _ in range(500):
                if count == n:
                    break
                await asyncio.sleep(0.01)
            assert count == n
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def test_changes_are_named_to_the_leaf() -> None:
    old = Config(keys={"a": keyed("1"), "b": keyed("2")}, engine=EngineConfig(threads=1))
    new = Config(keys={"b": keyed("3", admin=True), "c": keyed("4")}, engine=EngineConfig(threads=2))
    assert sorted(changes(old, new)) == [
        "engine.threads 1 -> 2",
        "keys.a removed",
        "keys.b.admin False -> True",
        "keys.b.sha256 changed",
        "keys.c added",
    ]
    limits = (LimitConfig(period="day", tokens=5),)
    assert list(changes(keyed("1"), keyed("1", limits=limits), "k")) == [
        "k.limits [] -> [{period = day, rolling = False, tokens = 5}]"
    ]


# -- the process


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url + "/v1/models", timeout=5) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGHUP")
def test_a_hangup_reloads_and_the_end_of_the_terminal_ends_the_server(tmp_path: Path) -> None:
    config = '[model]\nname = "dummy"\n[engine]\nbackend = "numpy"\nnum_blocks = 32\n[server]\nport = 0\n'
    file = tmp_path / "minserve.toml"
    file.write_text(config, encoding="utf-8")

    ours, theirs = os.openpty()
    server = subprocess.Popen(
        [sys.executable, "-m", "minserve", "serve"],
        cwd=tmp_path,
        env=os.environ | {"MINSERVE_DATA": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent.parent.parent)},
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # whoever runs the tests may be under nohup
        text=True,
    )
    os.close(theirs)
    assert server.stdout is not None
    try:
        url = next(line.split()[1] for line in server.stdout if line.startswith("Chat"))
        assert status_of(url) == 200
        table = f'[keys.ann]\nuser = "ann"\nsha256 = "{keyed("ms-ann").sha256}"\n'
        file.write_text(config + table, encoding="utf-8")
        server.send_signal(signal.SIGHUP)
        until = time.monotonic() + 20
        while status_of(url) != 401:
            assert time.monotonic() < until
            time.sleep(0.05)
        os.close(ours)
        server.send_signal(signal.SIGHUP)  # the kernel sends it only to who owns the terminal
        assert server.wait(20) == 0
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
