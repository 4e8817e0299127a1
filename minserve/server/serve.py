"""`minserve serve`: take the port, load, serve, drain. Read `serve` first; it is the life of the process.

Owns the order of start and end, the signals, and the lines that a person reads meanwhile. It must not know routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from minserve.assemble import Assembly, assemble, default_name
from minserve.async_engine import AsyncEngine
from minserve.backend.base import BackendError, CheckpointError
from minserve.config import Config
from minserve.economics.accounting import Accounting
from minserve.economics.schema import LedgerError
from minserve.observe.log import setup
from minserve.request import Pool
from minserve.server.app import create_app
from minserve.server.services import ServedModel, Services
from minserve.server.site import PortInUse, Site, address_of, bind, loading_app
from minserve.server.telemetry import Telemetry
from minserve.server.webhook import Webhook
from minserve.weights.cache import DownloadError

log = logging.getLogger("minserve.server")

_INTERRUPTED = 130  # what shells show for a process that a second Ctrl-C ended

Say = Callable[[str], None]


def run(config: Config) -> int:
    """Serve until a signal comes; the process's exit status."""
    setup(config.server.log_format, config.server.log_level)
    try:
        return asyncio.run(serve(config))
    except (PortInUse, LedgerError, CheckpointError, BackendError, DownloadError, OSError, ValueError) as error:
        print(f"minserve: {error}", file=sys.stderr)
        return 1


async def serve(config: Config, *, say: Say | None = None) -> int:
    """The whole life: port, ledger, weights, engine, service, drain. Raises what `run` turns into a sentence."""
    say = say or _print
    stop = asyncio.Event()
    install_signals(stop)
    async with contextlib.AsyncExitStack() as cleanup:
        sock = bind(config.server.host, config.server.port)
        site = Site(sock)
        cleanup.push_async_callback(site.close)
        telemetry = Telemetry(config.model.served_name or default_name(config.model.name), config)
        webhook = Webhook(config.alerts.webhook) if config.alerts.webhook else None
        accounting = Accounting.open(config, data_dir(), send_alert=webhook, on_row=telemetry.row)
        if webhook is not None:
            cleanup.push_async_callback(webhook.close)
        cleanup.push_async_callback(accounting.close)
        await site.serve(loading_app())
        assembly = await load(config, telemetry, say, stop)
        if assembly is None:
            return 0
        engine = AsyncEngine(
            assembly.engine,
            max_queue={Pool.INTERACTIVE: config.pools.interactive.max_queue, Pool.BULK: config.pools.bulk.max_queue},
            step_timeout=config.timeouts.step_s,
        )
        cleanup.push_async_callback(engine.stop)
        await engine.start()
        telemetry.watch(engine.status)
        services = Services.of(config, served_model(assembly), engine, accounting, telemetry)
        cleanup.callback(services.text.close)
        await site.serve(create_app(services))
        say_ready(assembly, address_of(sock), say)
        await stop.wait()
        await drain(services, site, say)
    return 0


async def load(config: Config, telemetry: Telemetry, say: Say, stop: asyncio.Event) -> Assembly | None:
    """Assemble on a thread of its own, so that probes and signals are answered meanwhile. None: told to stop."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Assembly] = loop.create_future()

    def tell(line: str) -> None:
        loop.call_soon_threadsafe(say, line)

    def work() -> None:
        try:
            assembly = assemble(config, observers=telemetry.observers, progress=tell)
        except BaseException as error:
            _threadsafe(loop, _fail, loaded, error)
        else:
            _threadsafe(loop, _succeed, loaded, assembly)

    # A daemon: a signal while loading ends the process without waiting for the thread.
    threading.Thread(target=work, name="minserve-load", daemon=True).start()
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((loaded, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    return await loaded if loaded.done() else None


async def drain(services: Services, site: Site, say: Say) -> None:
    """Not ready, nothing new, finish what runs up to the limit, then end the rest with an error; settle everything."""
    timeouts = services.config.timeouts
    running = services.gateway.live
    say(f"Stopping: {running} running, at most {timeouts.drain_s:g} s. Press Ctrl-C again to exit at once.")
    await services.engine.drain(timeouts.drain_s)
    await services.gateway.settled(timeouts.step_s)
    await site.close()


def served_model(assembly: Assembly) -> ServedModel:
    return ServedModel(
        name=assembly.name,
        tokenizer=assembly.tokenizer,
        template=assembly.template,
        vocab_size=assembly.spec.vocab_size,
        max_model_len=assembly.max_model_len,
        defaults=assembly.loaded.defaults,
        details={"format": assembly.loaded.file_format, "device": assembly.backend.description},
    )


def say_ready(assembly: Assembly, address: str, say: Say) -> None:
    for note in assembly.notes:
        say(note)
    say(f"Model    {assembly.name}")
    say(f"Device   {assembly.backend.description}")
    say(f"Cache    {assembly.capacity()}")
    say(f"Chat     {address}")
    say(f"API      {address}/v1")


def install_signals(stop: asyncio.Event) -> None:
    """The first SIGINT or SIGTERM asks to drain, a second one exits at once."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(_INTERRUPTED)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, on_signal)
        except NotImplementedError:  # Windows' event loops have none
            signal.signal(number, lambda *_: _threadsafe(loop, on_signal))


def data_dir() -> Path:
    """MINSERVE_DATA, or this platform's folder for a user's application data; made if it is missing."""
    if moved := os.environ.get("MINSERVE_DATA"):
        folder = Path(moved).expanduser().absolute()
    elif sys.platform == "win32":
        folder = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "minserve"
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Application Support" / "minserve"
    else:
        folder = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "minserve"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _print(line: str) -> None:
    print(line, flush=True)


def _threadsafe(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
        loop.call_soon_threadsafe(function, *args)


def _succeed(future: asyncio.Future[Assembly], assembly: Assembly) -> None:
    if not future.done():
        future.set_result(assembly)


def _fail(future: asyncio.Future[Assembly], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
