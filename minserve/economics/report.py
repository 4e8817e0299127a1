"""`minserve cost`: the cost model of a ledger or a scenario, as a few lines that a decision can be made on, and a plot.

Owns what the report says. It must not know the command line.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from minserve.config import AccountConfig, Config, LimitConfig, UserConfig
from minserve.economics.costs import DAYS, Ceiling, Device, Margin, Spread, ceilings
from minserve.economics.plot import tail_plot
from minserve.economics.prices import NANO, Prices
from minserve.economics.queries import Filter
from minserve.economics.scenario import Scenario

_MODEL_CONTEXT = 8192  # assumed where the configuration does not say


@dataclass(frozen=True, slots=True)
class Lengths:
    """How much of the output that was reserved was used, in tokens. cut: share of calls ended by length."""

    reserved: int
    used: int
    cut: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """costs: per user and month. priced: something costs something. None where nothing is known of a part.

    ceilings: what bounds the cost of one user of `account` (as the configuration calls it), tightest first.
    """

    source: str
    currency: str
    costs: list[float]
    ceilings: list[Ceiling]
    account: str = ""
    margin: Margin | None = None
    lengths: Lengths | None = None
    device: Device | None = None
    device_hour: float | None = None
    priced: bool = True

    @property
    def spread(self) -> Spread:
        return Spread.of(self.costs)

    def lines(self) -> list[str]:
        s, unit = self.spread, self.currency
        out = [
            f"{self.source}: {s.users} {'user' if s.users == 1 else 'users'}, cost per user and month in {unit}",
            f"  mean {s.mean:.4g}   p50 {s.p50:.4g}   p95 {s.p95:.4g}   p99 {s.p99:.4g}   max {s.most:.4g}",
            f"  the dearest 1% of users cause {s.top_share:.0%} of the cost",
        ]
        if self.margin is not None:
            m = self.margin
            out.append(
                f"  at {m.price:g} {unit} a month: margin {m.per_user:.4g} per user ({m.share:.0%}); "
                f"{m.losing:.1%} of users cost more than they pay"
            )
        if not self.priced:
            out.append("  nothing has a price: set [prices], or give them as --set prices.decode=2")
        out.append(self._worst())
        if self.lengths is not None and self.lengths.reserved:
            out.append(
                f"  of the output reserved, {self.lengths.used / self.lengths.reserved:.0%} was used; "
                f"{self.lengths.cut:.0%} of calls were cut at their maximum"
            )
        out += self._device_lines()
        return out

    def _worst(self) -> str:
        if not self.ceilings:
            whose = f" of {self.account}" if self.account else ""
            return f"  no cap bounds what one user{whose} can cost: set limits (requests, tokens or money)"
        first = self.ceilings[0]
        reached = sum(cost >= first.cost for cost in self.costs) / len(self.costs)
        return (
            f"  the worst case is bounded by {first.name}: at most {first.cost:.4g} {self.currency} per user and "
            f"month, which {reached:.1%} of users reach"
        )

    def _device_lines(self) -> list[str]:
        device = self.device
        if device is None or not device.wall:
            return []
        out = [
            f"  device: {device.wall / 3600:.1f} hours up, {device.busy_share:.0%} busy, "
            f"{device.ideal / device.wall:.1%} of its peak"
        ]
        if self.device_hour is not None:
            paid = self.device_hour * device.wall / 3600
            prefill, decode = (("-" if p is None else f"{p:.4g}") for p in device.derived(self.device_hour))
            out.append(
                f"  it cost {paid:.4g} {self.currency}, {1 - device.busy_share:.0%} of that while idle; "
                f"it is paid for at {prefill} per million prompt and {decode} per million output tokens"
            )
        return out

    def plot(self) -> str:
        """SVG."""
        lines = {} if self.margin is None else {f"price {self.margin.price:g}": self.margin.price}
        if self.ceilings:
            lines[f"cap: {self.ceilings[0].name}"] = self.ceilings[0].cost
        return tail_plot(self.costs, lines, title=f"Cost per user and month: {self.source}", unit=self.currency)


def of_scenario(scenario: Scenario, name: str = "scenario") -> Report:
    prices = Prices.of(scenario.prices)
    costs = scenario.costs()
    price = scenario.price_per_user
    dearest_call = prices.cost(scenario.max_prompt, 0, scenario.max_output) / NANO
    return Report(
        source=name,
        currency=prices.currency,
        costs=costs,
        ceilings=ceilings(scenario.limits, prices, dearest_call=dearest_call),
        margin=None if price is None else Margin.of(costs, price),
    )


def of_ledger(
    database: sqlite3.Connection,
    chosen: Filter,
    prices: Prices,
    *,
    device_hour: float | None = None,
    account: str = "",
    bounds: Sequence[Ceiling] = (),
    price_per_user: float | None = None,
) -> Report:
    """What users (key, user and end user) cost, scaled from the time the rows span to a month.

    account: whose the bounds are. ValueError if no row matches. Less than a day of rows counts as a day: an hour says
    little about a month.
    """
    where, values = chosen.where()
    where += " AND (key <> '' OR user <> '')"  # refused callers whom nobody knows are no users
    first, last = database.execute(f"SELECT MIN(time), MAX(time) FROM calls WHERE {where}", values).fetchone()
    if first is None:
        raise ValueError("the ledger has no rows that match")
    scale = DAYS * 86400 / max(86400.0, last - first)
    found = database.execute(f"SELECT SUM(cost) FROM calls WHERE {where} GROUP BY key, user, end_user", values)
    costs = [cost / NANO * scale for (cost,) in found]
    return Report(
        source="ledger",
        currency=prices.currency,
        costs=costs,
        ceilings=list(bounds),
        account=account,
        margin=None if price_per_user is None else Margin.of(costs, price_per_user),
        lengths=_lengths(database, where, values),
        device=_device(database, chosen),
        device_hour=device_hour,
        priced=not prices.free,
    )


def loosest(config: Config, prices: Prices, key: str | None) -> tuple[str, list[Ceiling]]:
    """The account under which one user can cost most, and what bounds that, tightest first: its own caps, its user's,
    those of each end user, and the server's limit.

    Named as in the configuration: keys.NAME, or local. key: only this one. ValueError if there is no such key.
    """
    if key is not None and key not in config.keys:
        raise ValueError(f"there is no key {key!r} in the configuration")
    keys: Mapping[str, AccountConfig] = config.keys if key is None else {key: config.keys[key]}
    accounts = {f"keys.{name}": account for name, account in keys.items()} or {"local": config.local}
    found = {name: _bounds(account, config, prices) for name, account in accounts.items()}
    name = max(found, key=lambda name: found[name][0].cost if found[name] else math.inf)
    return name, found[name]


def _bounds(account: AccountConfig, config: Config, prices: Prices) -> list[Ceiling]:
    user = config.users.get(account.user, UserConfig())
    caps = (*account.limits, *account.end_user_limits, *user.limits)
    found = ceilings(caps, prices, dearest_call=_dearest_call(account, config, prices))
    spend = config.spend
    if spend.limit is not None:
        server = LimitConfig(period=spend.period, rolling=spend.rolling, money=spend.limit)
        (whole,) = ceilings((server,), prices, dearest_call=0)
        found.append(replace(whole, name=f"the server's limit of {whole.name}"))
    return sorted(found, key=lambda ceiling: ceiling.cost)


def _dearest_call(account: AccountConfig, config: Config, prices: Prices) -> float:
    """As many prompts as a call may hold, each with as many answers and all of them as long as they may be."""
    limits = config.limits
    prompt = limits.max_input_tokens or config.engine.max_model_len or _MODEL_CONTEXT
    output = limits.max_n * limits.max_tokens
    cost = prices.cost(limits.max_prompts * prompt, 0, limits.max_prompts * output) / NANO
    return cost if account.max_call_cost is None else min(cost, account.max_call_cost)


def _lengths(database: sqlite3.Connection, where: str, values: Sequence[object]) -> Lengths:
    reserved, used, cut, calls = database.execute(
        "SELECT SUM(max_tokens), SUM(completion_tokens), SUM(finish = 'length'), COUNT(*) FROM calls"
        f" WHERE {where} AND finish IN ('stop', 'length')",
        values,
    ).fetchone()
    return Lengths(reserved or 0, used or 0, (cut or 0) / calls if calls else 0.0)


def _device(database: sqlite3.Connection, chosen: Filter) -> Device:
    since, until = (int((bound or default) / 3600) for bound, default in ((chosen.since, 0.0), (chosen.until, 9e12)))
    columns = ("wall_s", "busy_s", "ideal_s", "prefill_tokens", "decode_tokens", "prefill_s", "decode_s")
    sums = ", ".join(f"COALESCE(SUM({column}), 0)" for column in columns)
    return Device(
        *database.execute(f"SELECT {sums} FROM device_hours WHERE hour BETWEEN ? AND ?", (since, until)).fetchone()
    )
