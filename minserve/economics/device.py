"""How the device's paid hours were spent, hour by hour: what prices are derived from and idle time is measured by.

Owns the sums of the hour that runs; finished ones, and every minute the running one, go to the ledger. Feeding it a
step costs a few additions.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from dataclasses import astuple, dataclass

from minserve.config import PricesConfig
from minserve.economics.prices import Prices
from minserve.request import StepRecord

log = logging.getLogger("minserve.accounting")

Execute = Callable[[str, tuple[object, ...]], None]

_WEEK_H = 7 * 24
_LEAST_S = 86400.0
_WRITE_EVERY_S = 60.0
# Added to what the hour already has: a restarted server goes on with it.
_ADD = (
    "INSERT INTO device_hours VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (hour) DO UPDATE SET"
    " wall_s = wall_s + excluded.wall_s, busy_s = busy_s + excluded.busy_s, ideal_s = ideal_s + excluded.ideal_s,"
    " prefill_tokens = prefill_tokens + excluded.prefill_tokens,"
    " decode_tokens = decode_tokens + excluded.decode_tokens,"
    " prefill_s = prefill_s + excluded.prefill_s, decode_s = decode_s + excluded.decode_s"
)


@dataclass(slots=True)
class Work:
    """Seconds and tokens. ideal: at the device's measured peaks. A mixed step's time is split between its tokens."""

    busy: float = 0.0
    ideal: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill: float = 0.0
    decode: float = 0.0


class DeviceHours:
    def __init__(self, execute: Execute, clock: Callable[[], float]) -> None:
        """clock: Unix seconds, never decreasing. A step belongs to the hour in which it is written."""
        self._execute = execute
        self._clock = clock
        self._since = clock()
        self._work = Work()
        self._decode_s = 0.0  # of steps that only decoded, and their tokens: what a decode token takes
        self._decode_tokens = 0

    def step(self, record: StepRecord) -> None:
        work = self._work
        work.busy += record.run
        work.ideal += record.ideal
        work.prefill_tokens += record.prefill_tokens
        work.decode_tokens += record.decode_tokens
        decode = self._decode_share(record)
        work.decode += decode
        work.prefill += record.run - decode
        if self._clock() - self._since >= _WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Hand what has gathered to the ledger. Idle hours in between get their wall time, each its own."""
        now = self._clock()
        work, self._work = self._work, Work()
        while (end := (int(self._since / 3600) + 1) * 3600.0) <= now:
            self._add(end - self._since, Work())
            self._since = end
        self._add(now - self._since, work)
        self._since = now

    def _add(self, wall: float, work: Work) -> None:
        self._execute(_ADD, (int(self._since / 3600), wall, *astuple(work)))

    def _decode_share(self, record: StepRecord) -> float:
        """Seconds of a step that its decode tokens took: all, none, or what they take when they are alone."""
        if not record.decode_tokens:
            return 0.0
        if not record.prefill_tokens:
            self._decode_s += record.run
            self._decode_tokens += record.decode_tokens
            return record.run
        if self._decode_tokens:
            alone = self._decode_s / self._decode_tokens
        else:
            alone = record.run / record.tokens
        return min(record.run, alone * record.decode_tokens)


def priced(config: PricesConfig, database: sqlite3.Connection, now: float) -> Prices:
    """The prices; those that are derived by the utilization of the trailing week, unless the configuration names one.

    It is the time that the week's tokens take at the configured rates (where there is none, the time that they took)
    over the time that was paid for: so at these prices they would have paid for it. Less than a day says nothing.
    """
    if config.device_hour is None or config.utilization is not None:
        return Prices.of(config)
    columns = ("wall_s", "prefill_tokens", "prefill_s", "decode_tokens", "decode_s")
    wall, prefills, prefill_s, decodes, decode_s = database.execute(
        f"SELECT {', '.join(f'COALESCE(SUM({column}), 0)' for column in columns)} FROM device_hours WHERE hour > ?",
        (int(now / 3600) - _WEEK_H,),
    ).fetchone()
    rates = config.prefill_tokens_per_s, config.decode_tokens_per_s
    useful = (prefills / rates[0] if rates[0] else prefill_s) + (decodes / rates[1] if rates[1] else decode_s)
    if wall < _LEAST_S or not useful:
        log.info("prices are derived as if the device always worked: less than a day of it has been measured")
        return Prices.of(config)
    share = min(1.0, useful / wall)
    log.info("prices are derived from a utilization of %.2g %%, that of the trailing week", 100 * share)
    return Prices.of(config, share)
