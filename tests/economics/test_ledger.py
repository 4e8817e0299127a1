"""The ledger's file: group commits, failures, crashes, migrations, locks, retention."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from minserve.economics import schema
from minserve.economics.ledger import Ledger
from minserve.economics.rows import COLUMNS, Row
from minserve.economics.schema import LedgerError, lock_folder, lock_ledger, migrate, open_database


def row(seq: int, **fields: object) -> Row:
    return Row(**{"seq": seq, "time": 1000.0 + seq, "id": f"r{seq}", **fields})  # type: ignore[arg-type]


def stored(path: Path, columns: str = "seq, finish, cost") -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(f"SELECT {columns} FROM calls ORDER BY seq").fetchall()


def full(ledger: Ledger) -> None:
    """As if the disk were full: no page can be added to the file any more."""
    pages = ledger.database.execute("PRAGMA page_count").fetchone()[0]
    ledger.database.execute(f"PRAGMA max_page_count = {pages}")


def roomy(ledger: Ledger) -> None:
    ledger.database.execute("PRAGMA max_page_count = 1000000")


BIG = "x" * 100_000  # more than the free space of any page


def test_the_columns_of_the_file_are_the_fields_of_a_row(tmp_path: Path) -> None:
    database = open_database(tmp_path / "l.db", "process")
    assert tuple(c[1] for c in database.execute("PRAGMA table_info(calls)")) == COLUMNS
    database.close()


async def test_a_committed_row_is_on_disk_and_a_put_one_soon_after(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.db")
    await ledger.commit(row(1))
    assert stored(ledger.path) == [(1, "open", 0)]
    ledger.put(row(1, finish="stop", cost=7))
    await asyncio.sleep(0.2)
    assert stored(ledger.path) == [(1, "stop", 7)]
    await ledger.close()


async def test_commits_of_one_moment_share_a_transaction(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.db")
    transactions: list[str] = []
    ledger.database.set_trace_callback(lambda sql: transactions.append(sql) if sql.startswith("COMMIT") else None)
    await asyncio.gather(*(ledger.commit(row(i)) for i in range(50)))
    assert len(stored(ledger.path)) == 50
    assert len(transactions) <= 2
    await ledger.close()


@pytest.mark.parametrize("durability", ["process", "power"])
async def test_a_commit_takes_a_few_milliseconds(tmp_path: Path, durability: str) -> None:
    ledger = Ledger(tmp_path / "l.db", durability=durability)
    await ledger.commit(row(0))
    times = []
    for i in range(1, 30):
        started = asyncio.get_running_loop().time()
        await ledger.commit(row(i))
        times.append(asyncio.get_running_loop().time() - started)
    assert min(times) < 0.005
    await ledger.close()


async def test_a_full_disk_fails_the_commit_and_keeps_settlements_for_later(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.db")
    await ledger.commit(row(1))
    full(ledger)
    with pytest.raises(LedgerError):
        await ledger.commit(row(2, model=BIG))
    assert not ledger.available
    ledger.put(row(1, finish="stop", cost=7, model=BIG))
    ledger.put(row(3, finish="refused"))  # nothing depends on it, and a flood of them must not fill the memory
    await ledger.flush()
    assert stored(ledger.path) == [(1, "open", 0)]
    assert ledger.lost_rows == 1
    roomy(ledger)
    await ledger.flush()
    assert ledger.available
    assert stored(ledger.path) == [(1, "stop", 7)]
    await ledger.close()
    assert ledger.lost_rows == 1


async def test_rows_that_could_not_be_written_until_the_end_are_counted(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.db")
    await ledger.commit(row(1))
    full(ledger)
    ledger.put(row(1, finish="stop", model=BIG))
    await ledger.close()
    assert ledger.lost_rows == 1
    await ledger.close()


async def test_a_cancelled_waiter_does_not_disturb_the_others(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.db")
    tasks = [asyncio.ensure_future(ledger.commit(row(i))) for i in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [r is None for r in results] == [True, False, True]
    assert len(stored(ledger.path)) == 3
    await ledger.close()


async def test_open_rows_of_a_dead_process_are_settled_at_what_they_reserved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path / "l.db")
    await ledger.commit(row(1, asked_prompt=10, max_tokens=20, reserved=300))
    await ledger.commit(row(2, finish="stop", cost=5))
    ledger.database.close()  # the process dies: nothing is settled
    again = Ledger(tmp_path / "l.db")
    assert again.interrupted == 1
    assert caplog.messages == ["calls cut off by a crash, settled at what they had reserved: 1"]
    assert again.number() == 3
    assert stored(again.path, "seq, finish, cost, prompt_tokens, completion_tokens") == [
        (1, "interrupted", 300, 10, 20),
        (2, "stop", 5, 0, 0),
    ]
    await again.close()


def test_a_ledger_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    open_database(path, "process").close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 99")
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="newer minserve"):
        open_database(path, "process")
    assert path.read_bytes() == before


def test_an_older_ledger_is_copied_before_it_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    database = open_database(path, "process")
    database.execute("INSERT INTO resets VALUES (1, 'key', '[]')")
    database.commit()
    migrate(database, path, (*schema.MIGRATIONS, "ALTER TABLE resets ADD COLUMN why TEXT;"))
    assert database.execute("SELECT kind, why FROM resets").fetchall() == [("key", None)]
    database.close()
    known = len(schema.MIGRATIONS)
    with closing(sqlite3.connect(tmp_path / f"l.db.schema-{known}.bak")) as copy:
        assert copy.execute("PRAGMA user_version").fetchone()[0] == known
        assert len(copy.execute("SELECT * FROM resets").fetchone()) == 3


def test_a_ledger_of_the_first_schema_keeps_its_rows_and_has_a_copy(tmp_path: Path) -> None:
    path, old = tmp_path / "l.db", msgspec.structs.astuple(row(1, finish="stop", cost=7))[:-1]
    with closing(sqlite3.connect(path)) as database:
        migrate(database, path, schema.MIGRATIONS[:1])
        database.execute(f"INSERT INTO calls ({', '.join(COLUMNS[:-1])}) VALUES ({', '.join('?' * len(old))})", old)
        database.commit()
    open_database(path, "process").close()
    assert stored(path, ", ".join(COLUMNS)) == [(*old, None)]
    with closing(sqlite3.connect(tmp_path / "l.db.schema-1.bak")) as copy:
        assert copy.execute("SELECT * FROM calls").fetchall() == [old]


def test_a_failed_migration_leaves_the_old_schema(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    database = open_database(path, "process")
    with pytest.raises(sqlite3.Error):
        migrate(database, path, (*schema.MIGRATIONS, "CREATE TABLE more (a); CREATE TABLE calls (a);"))
    database.close()
    database = open_database(path, "process")
    assert database.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'more'").fetchone()[0] == 0
    database.close()


def test_files_that_are_no_ledger_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("hello " * 100)
    with pytest.raises(LedgerError, match=r"text\.db"):
        open_database(tmp_path / "text.db", "process")
    with closing(sqlite3.connect(tmp_path / "other.db")) as database:
        database.execute("CREATE TABLE photos (a)")
    with pytest.raises(LedgerError, match="not a ledger"):
        open_database(tmp_path / "other.db", "process")


def test_places_that_can_not_be_written_name_their_settings(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "data"):
        with pytest.raises(LedgerError, match="MINSERVE_DATA"):
            lock_folder(folder)
    with pytest.raises(LedgerError, match=r"ledger\.path"):
        lock_ledger(file / "ledger.db")
    for path in (file / "ledger.db", tmp_path):
        with pytest.raises(LedgerError, match=r"ledger\.path"):
            open_database(path, "process")


def test_two_servers_can_not_use_one_data_folder(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path)
    with pytest.raises(LedgerError, match="Another minserve"):
        lock_folder(tmp_path)
    lock.release()
    lock.release()
    lock_folder(tmp_path).release()


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
def test_a_link_to_a_ledger_is_the_same_ledger(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to("l.db")
    lock = lock_ledger(tmp_path / "l.db")
    with pytest.raises(LedgerError, match=r"link\.db"):
        lock_ledger(tmp_path / "link.db")
    lock.release()


def test_a_ledger_with_two_names_is_refused_by_both(tmp_path: Path) -> None:
    ledger, other = tmp_path / "l.db", tmp_path / "other.db"
    ledger.touch()
    other.hardlink_to(ledger)
    for name in (ledger, other):
        with pytest.raises(LedgerError, match="hard links"):
            lock_ledger(name)
    other.unlink()
    lock_ledger(ledger).release()


async def test_rows_that_were_written_are_written_though_old_ones_can_not_be_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path / "l.db", retention_days=1, clock=lambda: 10 * 86400.0)
    ledger.database.execute("CREATE TRIGGER keep BEFORE DELETE ON calls BEGIN SELECT RAISE(ABORT, 'kept'); END")
    ledger.put(row(1, finish="stop"))
    await ledger.flush()
    await ledger.commit(row(2))
    assert ledger.available
    assert stored(ledger.path, "seq") == [(1,), (2,)]
    assert caplog.messages == ["old rows could not be deleted: kept"]  # not with every batch
    await ledger.close()


async def test_old_rows_are_deleted_a_few_at_a_time_and_open_ones_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minserve.economics.retention._ROWS", 10)
    day = 86400.0
    ledger = Ledger(tmp_path / "l.db", retention_days=1, clock=lambda: 10 * day)
    for i in range(25):
        ledger.put(row(i, time=8 * day, finish="stop"))
    ledger.put(row(25, time=8 * day))
    ledger.put(row(26, time=9.5 * day, finish="stop"))
    for _ in range(4):
        await ledger.flush()
    assert stored(ledger.path, "seq") == [(25,), (26,)]
    await ledger.close()
