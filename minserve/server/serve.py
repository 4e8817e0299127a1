"""`minserve serve`: take the port, load, serve, drain. Read `serve` first; it is the life of the process.

Owns the order of start and end, and the lines that a person reads meanwhile. It must not know routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence

from minserve.assemble import Assembly, Fetch, Say, assemble, default_name, files_of, memory_fraction
from minserve.async_engine import AsyncEngine
from minserve.backend.base import BackendError, CheckpointError
from minserve.config import Config
from minserve.config_rules import doubtful, require_valid
from minserve.economics.accounting import Accounting
from minserve.economics.schema import LedgerError
from minserve.engine import Observer
from minserve.observe.log import setup
from minserve.observe.output import Output
from minserve.request import Pool
from minserve.server.app import create_app
from minserve.server.reload import Reread, reload_on
from minserve.server.services import ServedModel, Services
from minserve.server.signals import install_signals
from minserve.server.site import PortInUse, Site, address_of, bind, loading_app
from minserve.server.telemetry import Telemetry
from minserve.server.webhook import Webhook
from minserve.settings import data_dir
from minserve.threads import call_threadsafe, fail, succeed
from minserve.weights.cache import DownloadError

log = logging.getLogger("minserve.server")

FAULTS = (PortInUse, LedgerError, CheckpointError, BackendError, DownloadError, OSError, ValueError)

Meanwhile = Callable[[Accounting], contextlib.AbstractAsyncContextManager[None]]


def run(config: Config, reread: Reread | None = None, fetch: Fetch = files_of) -> int:
    """Serve until a signal comes; the process's exit status. reread: the configuration as its file says now."""
    # Worker and event loop hand each other every step; with Python's 5 ms one waits for the other's whole slice.
    sys.setswitchinterval(0.0005)
    with Output(sys.stdout, sys.stderr) as output:
        setup(config.server.log_format, config.server.log_level, output.errors)
        try:
            return asyncio.run(serve(config, reread, output, fetch))
        except FAULTS as error:
            output.errors.write(f"minserve: {error}\n")
            return 1


async def serve(config: Config, reread: Reread | None, output: Output, fetch: Fetch) -> int:
    """The whole life: port, ledger, weights, engine, service, drain. Raises what `run` turns into a sentence."""
    say = output.say
    stop, hangup = asyncio.Event(), asyncio.Event()
    last: list[Callable[[], None]] = [output.close]
    install_signals(stop, hangup, last)
    async with contextlib.AsyncExitStack() as cleanup:
        sock = bind(config.server.host, config.server.port)
        site = Site(sock)
        cleanup.push_async_callback(site.close)

        @contextlib.asynccontextmanager
        async def meanwhile(accounting: Accounting) -> AsyncIterator[None]:
            await site.serve(loading_app(config.server, accounting))
            try:
                yield
            finally:
                await site.close()  # before the ledger: whoever is refused until then has a row

        services = await cleanup.enter_async_context(opened(config, say, stop, fetch, meanwhile))
        if services is None:
            return 0
        last.insert(0, services.gateway.abandon)
        cleanup.callback(last.pop, 0)  # settled in good order by then
        await site.serve(create_app(services))
        if reread is not None:
            reloading = asyncio.create_task(reload_on(hangup, services, reread))
            cleanup.callback(reloading.cancel)
        # What stands now stays. A full collection would look at all of it again, and no stream get a token meanwhile.
        gc.freeze()
        say_ready(config, address_of(sock), say)
        await stop.wait()
        await drain(services, site, say)
    return 0


@contextlib.asynccontextmanager
async def opened(
    config: Config, say: Say, stop: asyncio.Event, fetch: Fetch = files_of, meanwhile: Meanwhile | None = None
) -> AsyncIterator[Services | None]:
    """Ledger, weights, engine: all that stands behind the gateway, whoever brings the calls. None: told to stop.

    meanwhile: entered when rows can be written, before the model is loaded, and left before they no longer can.
    """
    require_valid(config)
    async with contextlib.AsyncExitStack() as cleanup:
        telemetry = Telemetry(config.model.served_name or default_name(config.model.name), config)
        webhook = Webhook(config.alerts.webhook) if config.alerts.webhook else None
        accounting = Accounting.open(config, data_dir(), send_alert=webhook, on_row=telemetry.row)
        if webhook is not None:
            cleanup.push_async_callback(webhook.close)
        cleanup.push_async_callback(accounting.close)
        if meanwhile is not None:
            await cleanup.enter_async_context(meanwhile(accounting))
        assembly = await load(config, (*telemetry.observers, accounting.observe), say, stop, fetch)
        if assembly is None:
            yield None
            return
        engine = AsyncEngine(
            assembly.engine,
            max_queue={pool: config.pools.of(pool).max_queue for pool in Pool},
            step_timeout=config.timeouts.step_s,
        )
        cleanup.push_async_callback(engine.stop)
        await engine.start()
        telemetry.watch(engine.status, cache_info(config, assembly))
        services = Services.of(config, served_model(assembly), engine, accounting, telemetry)
        cleanup.callback(services.text.close)
        describe(assembly, say)
        yield services


async def load(
    config: Config, observers: Sequence[Observer], say: Say, stop: asyncio.Event, fetch: Fetch
) -> Assembly | None:
    """Assemble on a thread of its own, so that probes and signals are answered meanwhile. None: told to stop."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Assembly] = loop.create_future()

    def tell(line: str) -> None:
        call_threadsafe(loop, say, line)

    def work() -> None:
        try:
            assembly = assemble(config, observers=observers, progress=tell, fetch=fetch)
        except BaseException as error:
            fail(loaded, error)
        else:
            succeed(loaded, assembly)

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
        defaults=assembly.defaults,
        details={"format": assembly.file_format, "device": assembly.backend.description},
    )


def cache_info(config: Config, assembly: Assembly) -> dict[str, str]:
    """What vllm:cache_config_info says: the settings as they came to be."""
    return {
        "block_size": str(assembly.limits.block_size),
        "num_gpu_blocks": str(assembly.limits.num_blocks),
        "gpu_memory_utilization": str(memory_fraction(config.engine, assembly.backend)),
        "enable_prefix_caching": str(config.engine.prefix_caching),
    }


def describe(assembly: Assembly, say: Say) -> None:
    for note in assembly.notes:
        say(note)
    say(f"Model    {assembly.name}")
    say(f"Device   {assembly.backend.description}")
    say(f"Cache    {assembly.capacity()}")


def say_ready(config: Config, address: str, say: Say) -> None:
    say(f"Chat     {address}")
    say(f"API      {address}/v1")
    for line in doubtful(config):
        say(f"Warning  {line}")
