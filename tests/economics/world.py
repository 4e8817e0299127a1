"""What a random run of the accounting should have counted: a plain list of what every call reserved or used, and when.

It is compared with every counter, by the definition of the period, and in the end with the ledger and the metrics.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from minserve.config import (
    AccountConfig,
    Config,
    KeyConfig,
    LimitConfig,
    LoopsConfig,
    PricesConfig,
    RunConfig,
    SpendConfig,
    UserConfig,
)
from minserve.economics.accounting import Accounting
from minserve.economics.caps import Limit, Scope
from minserve.economics.clock import SteadyClock
from minserve.economics.keys import digest
from minserve.economics.ledger import Ledger
from minserve.economics.reservation import Reservation
from minserve.economics.rows import Row
from minserve.economics.windows import ZERO, Amount, Period
from minserve.observe.gauges import Gauges
from minserve.observe.metrics import Metrics

CAPS = {
    "key": (
        LimitConfig(period="minute", requests=6, tokens=200),
        LimitConfig(period="hour", rolling=True, tokens=900, money=1e-3),
    ),
    "end_user": (LimitConfig(period="minute", rolling=True, requests=3), LimitConfig(period="day", money=0.4e-3)),
    "user": (LimitConfig(period="day", requests=25, money=1.5e-3),),
}
SPEND = 3_000_000  # billionths
MORE = {kind: (*caps, LimitConfig(period="month", requests=10**6)) for kind, caps in CAPS.items()}
USERS = {"a": "alice", "b": "alice", "c": "bob"}


def config_with(caps: dict[str, tuple[LimitConfig, ...]]) -> Config:
    keys = {
        name: KeyConfig(
            sha256=digest(name).hex(),
            user=user,
            limits=caps["key"],
            end_user_limits=caps["end_user"],
            run=RunConfig(max_calls=7),
        )
        for name, user in USERS.items()
    }
    return Config(
        keys=keys,
        users={user: UserConfig(limits=caps["user"]) for user in USERS.values()},
        local=AccountConfig(),
        prices=PricesConfig(prefill=2.0, cached=1.0, decode=4.0),
        spend=SpendConfig(limit=SPEND * 1e-9, period="hour", rolling=True),
        loops=LoopsConfig(run_idle_s=1e8),  # no run ends
    )


def limits_with(caps: dict[str, tuple[LimitConfig, ...]]) -> dict[str, list[Limit]]:
    own = {kind: [Limit.of(config) for config in configs] for kind, configs in caps.items()}
    return own | {
        "server": [Limit(Period("hour", rolling=True), cost=SPEND)],
        "run": [Limit(Period("ever"), requests=7)],
    }


CONFIGS = [config_with(caps) for caps in (CAPS, MORE)]
LIMITS = [limits_with(caps) for caps in (CAPS, MORE)]


@dataclass
class Entry:
    """What one call holds: its reservation, then what it used. scopes: who it counts against, until they are reset."""

    row: Row
    amount: Amount
    scopes: set[Scope]
    reservation: Reservation | None

    @property
    def reserved(self) -> Amount:
        return Amount(1, self.row.asked_prompt + self.row.max_tokens, self.row.reserved)


@dataclass
class World:
    folder: Path
    wall: float = 1.8e9 + 3570.0
    monotonic: float = 0.0
    caps: int = 0  # which of the two configurations
    entries: list[Entry] = field(default_factory=list)
    scopes: set[Scope] = field(default_factory=set)
    refused: list[int] = field(default_factory=list)
    lost: int = 0  # settlements
    metrics: Metrics = field(default_factory=lambda: Metrics("m", lambda: Gauges({}, {}, 1, 1)))

    def open(self) -> Accounting:
        ledger = Ledger(self.folder / "ledger.db")
        clock = SteadyClock(lambda: self.wall, lambda: self.monotonic, floor=ledger.last_time)
        return Accounting(CONFIGS[self.caps], ledger=ledger, clock=clock, on_row=self.metrics.row)

    def wait(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds

    def holds(self, scope: Scope, period: Period, now: float) -> list[Entry]:
        return [e for e in self.entries if scope in e.scopes and period.bucket(e.row.time) >= period.oldest(now)]


def scopes_of(key: str, end_user: str, run: str) -> set[Scope]:
    found = {Scope("server"), Scope("key", (key,)), Scope("user", (USERS[key],)), Scope("end_user", (key, end_user))}
    return found | {Scope("run", (key, run))} if run else found


def check(accounting: Accounting, world: World) -> None:
    """Every counter is exactly what the list says, and within its cap. What is spent is what was settled."""
    now = accounting.clock()
    for scope in world.scopes:
        for limit in LIMITS[world.caps][scope.kind]:
            expected = ZERO
            for entry in world.holds(scope, limit.period, now):
                expected = expected.plus(entry.amount)
            assert accounting.counters.limiter.used(scope, limit.period, now) == expected, (scope, limit.period)
            assert limit.surplus(expected) == ZERO, (scope, limit.period)
    settled = [e for e in world.holds(Scope("server"), Period("hour", rolling=True), now) if e.reservation is None]
    assert accounting.spent_share == sum(entry.amount.cost for entry in settled) / SPEND


TOTALS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


def compare_sums(world: World, crashes: bool) -> None:
    """The ledger against the list, and against Prometheus where no crash has come between."""
    with closing(sqlite3.connect(world.folder / "ledger.db")) as database:
        sums = database.execute(
            "SELECT COALESCE(SUM(prompt_tokens + completion_tokens), 0), COALESCE(SUM(cost), 0),"
            " COUNT(*) - COALESCE(SUM(finish = 'refused'), 0), SUM(finish = 'open') FROM calls"
        ).fetchone()
        refused = database.execute("SELECT COUNT(*) FROM calls WHERE finish = 'refused'").fetchone()[0]
    entries = world.entries
    assert sums[:3] == (sum(e.amount.tokens for e in entries), sum(e.amount.cost for e in entries), len(entries))
    assert not sums[3]
    if not crashes:
        samples = [s for family in world.metrics.registry.collect() for s in family.samples]
        tokens = sum(s.value for s in samples if s.name in TOTALS)
        cost = sum(s.value for s in samples if s.name == "minserve_cost_total")
        assert tokens == sums[0]
        assert round(cost * 1e9) == sums[1]
        assert sum(s.value for s in samples if s.name == "vllm:admission_rejections_total") == refused
