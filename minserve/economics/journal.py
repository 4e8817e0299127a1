"""The rows of calls: numbered as they come, on the disk before a call runs, written again when it has ended.

Owns who gets a row, and what a ledger that can't be written means for calls. It must not know counters or money.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from minserve.economics.allowance import Allowance
from minserve.economics.ledger import Ledger
from minserve.economics.reservation import Admission
from minserve.economics.rows import Row
from minserve.economics.schema import LedgerError
from minserve.economics.settlement import Settlement
from minserve.request import RequestError

log = logging.getLogger("minserve.accounting")

OnRow = Callable[[Row], None]


class Journal:
    def __init__(self, ledger: Ledger | None, *, required: bool, on_row: OnRow | None) -> None:
        """required: no call runs whose row can't be written. on_row: called with every finished row."""
        self._ledger = ledger
        self._required = required
        self._on_row = on_row
        self._strangers = Allowance(rate=1, burst=60)  # rows: at worst some 20 MB a day
        self._next_seq = 0

    @property
    def recording(self) -> bool:
        """Calls can be taken: their rows can be written, or need not be."""
        return self._ledger is None or self._ledger.available or not self._required

    def number(self) -> int:
        if self._ledger is not None:
            return self._ledger.number()
        self._next_seq += 1
        return self._next_seq

    async def begin(self, row: Row) -> None:
        """Return when the open row is on the disk. RequestError 503 if it can't be, and has to."""
        if self._ledger is None:
            return
        try:
            await self._ledger.commit(row)
        except LedgerError:
            if self._required:
                raise RequestError(
                    "The server can't record calls now, so it does not take any.",
                    status=503,
                    code="ledger_unavailable",
                    retry_after=10,
                ) from None

    def finish(self, row: Row, started: float, end: Settlement, cost: int) -> Row:
        """The row of a call that was begun, as it has ended. started: time.monotonic() of its arrival."""
        row = _ended(row, started, end, cost)
        self._finished(row)
        return row

    def record(self, admission: Admission, now: float, end: Settlement) -> None:
        """A row for a call that never got a reservation. Nobody can fill the disk who has no account: beyond a rate,
        calls without one are counted and logged, not written."""
        write = admission.identity is not None or self._strangers.take(now)
        self._finished(_ended(admission.row(self.number(), now), admission.started, end), write=write)

    def _finished(self, row: Row, *, write: bool = True) -> None:
        if write and self._ledger is not None:
            self._ledger.put(row)
        if self._on_row is not None:
            try:
                self._on_row(row)
            except Exception:  # an observer's fault must not cost a client its answer
                log.exception("an observer of the ledger failed")


def _ended(row: Row, started: float | None, end: Settlement, cost: int = 0) -> Row:
    total_ms = None if started is None else round((time.monotonic() - started) * 1e3, 3)
    return msgspec.structs.replace(row, cost=cost, total_ms=total_ms, **end.columns())
