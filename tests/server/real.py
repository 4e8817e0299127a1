"""The real engine on a tiny random model, behind the real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from minserve.assemble import Assembly, assemble
from minserve.async_engine import AsyncEngine
from minserve.config import Config, EngineConfig, ModelConfig
from minserve.request import Pool
from minserve.server.serve import served_model
from tests.server.serving import MODEL, Server, serving
from tests.serving import idle

SMALL = EngineConfig(backend="numpy", num_blocks=64, block_size=8, max_num_seqs=6, max_num_batched_tokens=48)
ROOMY = EngineConfig(backend="numpy", num_blocks=256, block_size=16, max_num_seqs=8, max_num_batched_tokens=256)
GREEDY = {"temperature": 0, "ignore_eos": True}


def small_model(engine: EngineConfig = SMALL) -> Assembly:
    return assemble(Config(model=ModelConfig(name="dummy:llama-tiny", served_name=MODEL), engine=engine))


@asynccontextmanager
async def real_server(
    engine: EngineConfig = SMALL, *, max_queue: int = 256, step_timeout: float = 30.0, **sections: Any
) -> AsyncIterator[tuple[Server, Assembly]]:
    """sections: of the server's configuration."""
    assembly = small_model(engine)
    runner = AsyncEngine(assembly.engine, max_queue=dict.fromkeys(Pool, max_queue), step_timeout=step_timeout)
    await runner.start()
    try:
        async with serving(runner, model=served_model(assembly), engine=engine, **sections) as server:
            assembly.engine.observers.extend(server.services.telemetry.observers)
            yield server, assembly
    finally:
        await runner.stop()


def idle_invariants(server: Server) -> None:
    """Nothing is held by anybody, and every row is closed."""
    idle(server.engine)
    assert server.services.gateway.live == 0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
