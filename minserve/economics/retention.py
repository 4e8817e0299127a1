"""How long rows of the ledger are kept.

Owns which rows are too old. It must not know when it is asked: the ledger's writer does that, after a batch.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable

from minserve.economics.rows import OPEN

log = logging.getLogger("minserve.ledger")

_EVERY_S = 3600.0
_ROWS = 2000  # a transaction; the writer must not be away for long


class Retention:
    """seconds 0: for ever. A run that was active in the last run_idle_s may go on: it keeps all of its rows, since they
    hold its budget. clock: Unix seconds."""

    def __init__(
        self, database: sqlite3.Connection, seconds: float, run_idle_s: float, clock: Callable[[], float]
    ) -> None:
        self._database = database
        self._seconds = seconds
        self._run_idle_s = run_idle_s
        self._clock = clock
        self._next = 0.0

    def clean(self) -> None:
        """Delete a few old rows, if it is time; nobody waits for long, and nobody's batch fails with it."""
        now = self._clock()
        if not self._seconds or now < self._next:
            return
        try:
            with self._database:
                deleted = self._database.execute(
                    "DELETE FROM calls WHERE seq IN (SELECT seq FROM calls AS old WHERE time < ? AND finish <> ?"
                    " AND NOT (run <> '' AND EXISTS (SELECT 1 FROM calls WHERE run <> '' AND key = old.key"
                    " AND run = old.run AND time >= ?)) LIMIT ?)",
                    (now - self._seconds, OPEN, now - self._run_idle_s, _ROWS),
                ).rowcount
        except sqlite3.Error as error:
            log.warning("old rows could not be deleted: %s", error)
            deleted = 0
        if deleted < _ROWS:
            self._next = now + _EVERY_S
