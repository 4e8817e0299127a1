"""A configuration under which everything gives way in turn, and what a server says of it."""

from __future__ import annotations

from minserve.config import AccountConfig, DegradationConfig, PoolConfig, PoolsConfig
from tests.server.serving import Server

TEXT = "We are very busy. Opening hours: 9 to 5."
LADDER = DegradationConfig(enabled=True, shrink_to=4, texts={"faq": TEXT}, message="Too much to do, sorry.")
POOLS = PoolsConfig(interactive=PoolConfig(max_queue=10), bulk=PoolConfig())
EVERYBODY = AccountConfig(pools=("bulk",), allow_shrink=True)
FAQ = {"X-Feature": "faq"}


def count(server: Server, rung: str) -> float:
    labels = {"model_name": "tiny", "rung": rung}
    return server.services.telemetry.metrics.registry.get_sample_value("minserve_degraded_requests_total", labels) or 0


def rung(server: Server) -> float | None:
    registry = server.services.telemetry.metrics.registry
    return registry.get_sample_value("minserve_degradation_rung", {"model_name": "tiny"})
