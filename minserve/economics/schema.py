"""The ledger's file: its schema, how an older one is brought up to date, and the locks that keep two servers apart.

Owns the SQL that makes and changes tables. It must not know the writer. A file that a newer minserve wrote, or that is
no ledger, is refused and left as it is.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from minserve.economics.rows import OPEN
from minserve.file_lock import FileLock, beside

APPLICATION_ID = 0x6D696E73  # "mins", in the file's header

# Entry i brings a file from schema i to i + 1. Never change one that was released; append.
MIGRATIONS: tuple[str, ...] = (
    f"""
    CREATE TABLE calls (
        seq INTEGER PRIMARY KEY, time REAL NOT NULL, id TEXT NOT NULL,
        key TEXT NOT NULL, user TEXT NOT NULL, end_user TEXT NOT NULL, feature TEXT NOT NULL,
        run TEXT NOT NULL, token TEXT NOT NULL, pool TEXT NOT NULL, model TEXT NOT NULL, endpoint TEXT NOT NULL,
        asked_prompt INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL, max_tokens INTEGER NOT NULL, choices INTEGER NOT NULL,
        reserved INTEGER NOT NULL, cost INTEGER NOT NULL,
        queue_ms REAL, ttft_ms REAL, itl_p50_ms REAL, itl_p99_ms REAL, total_ms REAL,
        finish TEXT NOT NULL, status INTEGER NOT NULL, code TEXT NOT NULL, degraded TEXT NOT NULL,
        run_calls INTEGER, run_cost INTEGER
    );
    CREATE INDEX calls_time ON calls (time);
    CREATE INDEX calls_open ON calls (seq) WHERE finish = '{OPEN}';
    CREATE INDEX calls_run ON calls (key, run) WHERE run <> '';
    CREATE TABLE resets (time REAL NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL);
    CREATE TABLE device_hours (
        hour INTEGER PRIMARY KEY, wall_s REAL NOT NULL, busy_s REAL NOT NULL, ideal_s REAL NOT NULL,
        prefill_tokens INTEGER NOT NULL, decode_tokens INTEGER NOT NULL,
        prefill_s REAL NOT NULL, decode_s REAL NOT NULL
    );
    """,
    "ALTER TABLE calls ADD COLUMN asked_max_tokens INTEGER;",  # max_tokens holds what was given
)


class LedgerError(Exception):
    """The ledger can't be opened or written; the message says why and, where there is one, what to do."""


def open_database(path: Path, durability: str) -> sqlite3.Connection:
    """Open, create or migrate the ledger at `path`, for writing, to be used by one thread at a time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(path, check_same_thread=False, timeout=5.0)
    except (OSError, sqlite3.Error) as error:
        raise LedgerError(f"{path} can't be opened: {_why(error)}. ledger.path names another file") from None
    try:
        migrate(database, path)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA cache_size = -256")  # KiB: rows are appended, nobody reads them here again
        database.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
    except (sqlite3.Error, LedgerError) as error:
        database.close()
        raise LedgerError(str(error) if isinstance(error, LedgerError) else f"{path}: {error}") from None
    return database


def migrate(database: sqlite3.Connection, path: Path, migrations: tuple[str, ...] = MIGRATIONS) -> None:
    """Bring the file to the newest schema; a file with data in it is copied to ledger.db.schema-N.bak first."""
    found = schema_of(database, path, migrations)
    if found == len(migrations):
        return
    if found:
        backup(database, path.with_name(f"{path.name}.schema-{found}.bak"))
    for number, script in enumerate(migrations[found:], found + 1):
        # One transaction a step: a crash leaves the old schema or the new one.
        database.executescript(
            f"BEGIN; {script} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {number}; COMMIT;"
        )


def schema_of(database: sqlite3.Connection, path: Path, migrations: tuple[str, ...] = MIGRATIONS) -> int:
    """The file's schema, 0 for an empty file. LedgerError if it is newer than this program, or no ledger at all."""
    found = int(database.execute("PRAGMA user_version").fetchone()[0])
    owner = int(database.execute("PRAGMA application_id").fetchone()[0])
    tables = int(database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0])
    if tables and owner != APPLICATION_ID:
        raise LedgerError(f"{path} is an SQLite file, but not a ledger of minserve")
    if found > len(migrations):
        raise LedgerError(
            f"{path} was written by a newer minserve (schema {found}, this one knows {len(migrations)}): "
            "update minserve, or name another ledger.path."
        )
    return found


def backup(database: sqlite3.Connection, target: Path) -> None:
    """A consistent copy, also while others write."""
    with contextlib.closing(sqlite3.connect(target)) as copy:
        database.backup(copy)


def lock_folder(folder: Path) -> FileLock:
    """LedgerError if another server holds it, or it can't be made."""
    return _lock(folder / "server.lock", of=folder, setting="MINSERVE_DATA")


def lock_ledger(ledger: Path) -> FileLock:
    """As `lock_folder`: servers with data folders of their own may still name one ledger.

    A file with two names (hard links) would have two locks, and SQLite keeps what is not yet in it beside each name.
    """
    if ledger.is_file() and ledger.stat().st_nlink > 1:
        raise LedgerError(f"{ledger} has further names (hard links). Copy it, and name the copy in ledger.path")
    return _lock(beside(ledger), of=ledger, setting="ledger.path")


def _lock(path: Path, *, of: Path, setting: str) -> FileLock:
    """setting: what names another folder or file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(path)
    except BlockingIOError:
        raise LedgerError(
            f"Another minserve is running on {of}. Stop it, or give this one its own ({setting})."
        ) from None
    except OSError as error:
        raise LedgerError(f"{of} can't be written: {error.strerror}. {setting} names another one") from None


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
