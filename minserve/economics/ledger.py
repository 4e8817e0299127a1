"""The ledger: one SQLite file with a row for every call, refused and aborted ones too.

Owns the file and one writer thread. Rows are whole and written by their number, so a row may be written again (open,
then settled) and a failed batch may be repeated. `commit` is awaited: a reservation is on disk before any work is done.
`put` may lag one batch. It must not know what rows mean to budgets.

Commits are grouped: what is committed in one turn of the event loop, and whatever comes while the writer is busy, goes
into one transaction. With durability "process" a commit survives the death of this process (kill -9), with "power" that
of the machine, at the price of an fsync.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from minserve.config import LedgerConfig
from minserve.economics.retention import Retention
from minserve.economics.rows import COLUMNS, INTERRUPTED, OPEN, REFUSED, Row
from minserve.economics.schema import MIGRATIONS, LedgerError, open_database
from minserve.threads import call_threadsafe

log = logging.getLogger("minserve.ledger")

Statement = tuple[str, tuple[object, ...]]

LAG_S = 0.05  # how long a settlement may wait for company
RETRY_S = 1.0
MAX_KEPT = 100_000  # rows kept for a repetition while the disk is full
_WRITE = f"INSERT OR REPLACE INTO calls VALUES ({', '.join('?' * len(COLUMNS))})"
_PROBE: Statement = (f"PRAGMA user_version = {len(MIGRATIONS)}", ())  # writes a page, and changes nothing


def ledger_path(config: LedgerConfig, data_folder: Path) -> Path:
    return Path(config.path) if config.path else data_folder / "ledger.db"


class Ledger:
    """Open with the constructor (not on a busy loop: it may migrate), use on one event loop, end with `close`."""

    def __init__(
        self,
        path: Path,
        *,
        durability: str = "process",
        retention_days: int = 0,
        run_idle_s: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.database = open_database(path, durability)
        self._retention = Retention(self.database, retention_days * 86400.0, run_idle_s, clock)
        self.interrupted = self._close_open_rows()
        if self.interrupted:
            log.warning("calls cut off by a crash, settled at what they had reserved: %d", self.interrupted)
        seq, call, reset = self.database.execute(
            "SELECT COALESCE(MAX(seq), 0), COALESCE(MAX(time), 0.0), (SELECT COALESCE(MAX(time), 0.0) FROM resets)"
            " FROM calls"
        ).fetchone()
        self.last_time: float = max(call, reset)
        self._next_seq: int = seq + 1
        self.available = True
        self.lost_rows = 0
        self._rows: dict[int, Row] = {}
        self._statements: list[Statement] = []
        self._waiters: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._soon = False
        self._under_way = 0
        self._jobs: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def _close_open_rows(self) -> int:
        """Rows that a dead process left open are settled at what they reserved: a caller may have had all of it."""
        with self.database:
            return self.database.execute(
                f"UPDATE calls SET finish = '{INTERRUPTED}', cost = reserved, prompt_tokens = asked_prompt,"
                f" completion_tokens = max_tokens WHERE finish = '{OPEN}'"
            ).rowcount

    # -- on the event loop

    def number(self) -> int:
        self._next_seq += 1
        return self._next_seq - 1

    async def commit(self, row: Row) -> None:
        """Write a row and wait until it is committed. LedgerError if it could not be; an open row is not kept then."""
        self._rows[row.seq] = row
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._flush)
        await self._committed()

    def put(self, row: Row) -> None:
        """Write a row soon. While the disk is full, refused calls are counted as lost, others are kept for later."""
        if (not self.available and row.finish == REFUSED) or len(self._rows) >= MAX_KEPT:
            self.lost_rows += 1
            return
        self._rows[row.seq] = row
        self._later(LAG_S if self.available else RETRY_S)

    def execute(self, statement: str, values: tuple[object, ...]) -> None:
        """Run another statement with one of the next batches (resets, device hours)."""
        self._statements.append((statement, values))
        self._later(LAG_S if self.available else RETRY_S)

    async def flush(self) -> None:
        """Wait until everything put so far is committed, or could not be."""
        committed = self._committed()
        self._flush()
        with contextlib.suppress(LedgerError):
            await committed

    async def rest(self, tries: int = 100) -> None:
        """Return at a moment in which the file holds everything. LedgerError if there is none."""
        for _ in range(tries):
            await self.flush()
            if not (self._rows or self._statements or self._under_way):
                return
        raise LedgerError("the ledger can't be written now" if not self.available else "the ledger is never at rest")

    async def close(self) -> None:
        """Write what is left and close the file. Idempotent."""
        for _ in range(2):  # what the first attempt gave back is tried once more
            if self._thread is not None or self._rows or self._statements:
                await self.flush()
        if self._thread is not None:
            self._jobs.put(None)
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        if self._timer is not None:
            self._timer.cancel()
        if self._rows:
            self.lost_rows += len(self._rows)
            log.error("%d rows could not be written to %s", len(self._rows), self.path)
            self._rows.clear()
        self.database.close()

    def end_now(self, timeout: float) -> None:
        """Write what is left before the process ends, at most `timeout` seconds. Nothing can be put afterwards."""
        self._flush()
        self._jobs.put(None)
        assert self._thread is not None  # _flush starts it
        self._thread.join(timeout)

    def _committed(self) -> asyncio.Future[None]:
        """A future of the caller's own, for the batch that is being gathered: one that is cancelled disturbs nobody."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        return future

    def _later(self, delay: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(delay, self._flush)

    def _flush(self) -> None:
        """Hand what has gathered to the writer."""
        self._soon = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, args=(loop,), name="minserve-ledger", daemon=True)
            self._thread.start()
        self._under_way += 1
        self._jobs.put(_Batch(self._rows, self._statements, self._waiters))
        self._rows, self._statements, self._waiters = {}, [], []

    def _done(self, batches: Sequence[_Batch], error: LedgerError | None) -> None:
        """Back on the loop: tell who waited. Settled rows of a failed batch come back; open ones will be settled."""
        if error is not None and self.available:
            log.error("the ledger can't be written: %s", error)
        self.available = error is None
        self._under_way -= len(batches)
        for batch in batches:
            if error is not None:
                self._rows.update((seq, row) for seq, row in batch.rows.items() if row.finish not in (OPEN, REFUSED))
                self._statements[:0] = batch.statements
            for waiter in batch.waiters:
                if waiter.done():
                    continue
                if error is None:
                    waiter.set_result(None)
                else:
                    waiter.set_exception(error)
        if error is not None and not (self._rows or self._statements):
            self._statements.append(_PROBE)  # refused calls leave nothing to write: when it works again is found out so
        if self._rows or self._statements:
            self._later(LAG_S if error is None else RETRY_S)

    # -- on the writer thread

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        ending = False
        while not ending:
            batches: list[_Batch] = []
            job = self._jobs.get()
            while True:
                if job is None:
                    ending = True
                else:
                    batches.append(job)
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
            if batches:
                error = self._write(batches)
                if error is None:
                    self._retention.clean()
                call_threadsafe(loop, self._done, batches, error)

    def _write(self, batches: Sequence[_Batch]) -> LedgerError | None:
        rows = [msgspec.structs.astuple(row) for batch in batches for row in batch.rows.values()]
        try:
            with self.database:
                if rows:
                    self.database.executemany(_WRITE, rows)
                for batch in batches:
                    for statement, values in batch.statements:
                        self.database.execute(statement, values)
        except sqlite3.Error as error:
            return LedgerError(str(error))
        return None


class _Batch(NamedTuple):
    rows: dict[int, Row]
    statements: list[Statement]
    waiters: list[asyncio.Future[None]]
