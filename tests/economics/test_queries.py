"""Reading the ledger: filters, sums, and forms for people and programs."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from minserve.economics.ledger import Ledger
from minserve.economics.queries import GROUPS, Filter, reading, rows, summary, text
from minserve.economics.rows import COLUMNS, Row
from minserve.economics.schema import LedgerError

DAY = 86400.0


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    ledger = Ledger(tmp_path / "a folder?" / "l.db")
    for i in range(6):
        ledger.put(
            Row(
                seq=i,
                time=1.7e9 + i * DAY / 2,
                id=f"r{i}",
                key="web" if i % 2 else "cli",
                user="alice",
                feature="=chat()" if i == 5 else "chat",
                prompt_tokens=10,
                completion_tokens=i,
                cost=1000 * i,
                ttft_ms=1.25,
                finish="stop",
                status=200,
            )
        )
    await ledger.close()
    return ledger.path


def test_rows_are_filtered_and_the_latest_come_last(path: Path) -> None:
    with reading(path) as database:
        assert [r["id"] for r in rows(database, Filter())] == [f"r{i}" for i in range(6)]
        assert [r["id"] for r in rows(database, Filter(key="web"), limit=2)] == ["r3", "r5"]
        assert [r["id"] for r in rows(database, Filter(since=1.7e9 + DAY, until=1.7e9 + 2 * DAY))] == ["r2", "r3"]
        assert rows(database, Filter(user="' OR 1 --")) == []


def test_sums_per_group_dearest_first(path: Path) -> None:
    with reading(path) as database:
        found = summary(database, Filter(), ["key"])
        assert [(r["key"], r["calls"], r["cost"]) for r in found] == [("web", 3, 9000), ("cli", 3, 6000)]
        assert [r["calls"] for r in summary(database, Filter(), ["day"])] == [2, 1, 2, 1]
        assert summary(database, Filter(), [])[0]["prompt_tokens"] == 60
        for name in GROUPS:
            assert sum(int(str(r["calls"])) for r in summary(database, Filter(), [name])) == 6
        with pytest.raises(ValueError, match="can't group by id"):
            summary(database, Filter(), ["id"])


def test_the_ledger_is_only_read(path: Path) -> None:
    with reading(path) as database, pytest.raises(sqlite3.OperationalError, match="readonly"):
        database.execute("DELETE FROM calls")


async def test_it_can_be_read_while_a_server_writes(path: Path) -> None:
    ledger = Ledger(path)
    with reading(path) as database:
        await ledger.commit(Row(seq=ledger.number(), time=2e9, id="new"))
        assert rows(database, Filter(), limit=1)[0]["id"] == "new"
    await ledger.close()


def test_json_lines_and_csv_have_every_column(path: Path) -> None:
    with reading(path) as database:
        found = rows(database, Filter())
    lines = [json.loads(line) for line in text(found, "jsonl").splitlines()]
    assert lines == found
    assert list(lines[0]) == list(COLUMNS)
    table = list(csv.DictReader(io.StringIO(text(found, "csv"))))
    assert list(table[0]) == list(COLUMNS)
    assert table[5]["feature"] == "'=chat()"  # a spreadsheet must not run what a client sent
    assert table[2]["cost"] == "2000"
    assert text([], "csv") == text([], "jsonl") == text([], "table") == ""


def test_the_table_is_for_people(path: Path) -> None:
    with reading(path) as database:
        shown = text(rows(database, Filter(), limit=1), "table")
        sums = text(summary(database, Filter(), ["user"]), "table")
    head, line = shown.splitlines()
    assert head.split() == [
        *("time", "id", "user", "feature", "prompt_tokens", "completion_tokens", "cost"),
        *("ttft_ms", "total_ms", "finish", "status"),
    ]
    assert line.split() == [
        *("2023-11-17", "10:13:20", "r5", "alice", "=chat()", "10", "5", "0.000005", "1.2", "-", "stop", "200")
    ]
    assert head.index("feature") == line.index("=chat()")
    assert head.endswith("status")
    assert len(head) == len(line)
    assert "alice      6" in sums


def test_a_ledger_of_a_newer_minserve_is_said_to_be_one(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(LedgerError, match=r"newer minserve \(schema 99, this one knows \d\): update"), reading(path):
        pass


def test_no_ledger_and_foreign_files_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="There is no ledger"), reading(tmp_path / "none.db"):
        pass
    sqlite3.connect(tmp_path / "empty.db").close()
    (tmp_path / "empty.db").touch()
    with (
        pytest.raises(LedgerError, match="older minserve; minserve serve brings it up to date"),
        reading(tmp_path / "empty.db"),
    ):
        pass
    (tmp_path / "text.db").write_text("hello " * 200)
    with pytest.raises(LedgerError, match="not a database"), reading(tmp_path / "text.db"):
        pass
