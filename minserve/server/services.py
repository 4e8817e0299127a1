"""What the routes share: the model that is served and the rooms behind it.

Owns no behaviour. One `Services` lives as long as the application.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from aiohttp import web

from minserve.config import Config
from minserve.economics.accounting import Accounting
from minserve.economics.keys import Identity
from minserve.server.degradation import Degradation
from minserve.server.errors import not_found, shown
from minserve.server.gateway import Gateway
from minserve.server.ports import ServingEngine
from minserve.server.sampling import Rules
from minserve.server.telemetry import Telemetry
from minserve.server.text_worker import TextWorker
from minserve.text.template import ChatTemplate
from minserve.text.tokenizer import Tokenizer
from minserve.weights.loaded import GenerationDefaults


@dataclass(frozen=True, slots=True)
class ServedModel:
    """vocab_size: rows of the logits. max_model_len: prompt + output. details: shown in the model list."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    vocab_size: int
    max_model_len: int
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    details: Mapping[str, str] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    def check_name(self, asked: str | None) -> None:
        """RequestError 404 for a request that wants another model. None: whatever is served."""
        if asked is not None and asked != self.name:
            raise not_found(
                f"The model {shown(asked)} is not served here; this server has {self.name!r}.",
                "model_not_found",
                "model",
            )


@dataclass(slots=True)
class Services:
    """config and rules are read where they are used, never kept: a reload replaces them."""

    config: Config
    model: ServedModel
    engine: ServingEngine
    accounting: Accounting
    telemetry: Telemetry
    gateway: Gateway
    text: TextWorker
    rules: Rules

    @classmethod
    def of(
        cls, config: Config, model: ServedModel, engine: ServingEngine, accounting: Accounting, telemetry: Telemetry
    ) -> Services:
        degradation = Degradation(config, engine, accounting)
        if degradation.enabled:
            telemetry.gauge("minserve_degradation_rung", "0: none ... 4: calls are refused.", lambda: degradation.rung)
        if (ledger := accounting.ledger) is not None:
            telemetry.gauge(
                "minserve_ledger_lost_rows_total", "Rows that could not be written.", lambda: ledger.lost_rows
            )
        gateway = Gateway(
            engine,
            accounting,
            degradation,
            timeouts=config.timeouts,
            pools=config.pools,
            linger=config.server.on_disconnect == "linger",
        )
        rules = Rules(
            limits=config.limits,
            vocab_size=model.vocab_size,
            end_ids=model.tokenizer.end_ids,
            special_ids=model.tokenizer.special_texts,
            defaults=model.defaults,
        )
        return cls(config, model, engine, accounting, telemetry, gateway, TextWorker(), rules)

    def configure(self, config: Config) -> None:
        """Other limits from now on; the accounting has its own way."""
        self.config = config
        self.rules = replace(self.rules, limits=config.limits)


@dataclass(slots=True)
class Visit:
    """What is known of one HTTP request on its way through. code: of the error it ended with.

    request_id: what X-Request-ID says. named: the client chose it. identity: set by the guard, so every route but the
    open ones has it. recorded: the request has a row of the ledger, and its log line from that. started:
    time.monotonic().
    """

    request_id: str
    named: bool = False
    identity: Identity | None = None
    code: str | None = None
    recorded: bool = False
    started: float = field(default_factory=time.monotonic)

    def record(self, call_id: str) -> None:
        """This is a call. Unless the client has its own word for it, the reply's id is that of the row and the log."""
        self.recorded = True
        if not self.named:
            self.request_id = call_id


SERVICES: web.AppKey[Services] = web.AppKey("services", Services)
VISIT: web.RequestKey[Visit] = web.RequestKey("visit", Visit)


def identity_of(request: web.Request) -> Identity:
    """Who is calling."""
    identity = request[VISIT].identity
    assert identity is not None  # the guard sets it before any route that asks
    return identity
