"""Reading the ledger: rows and sums for people and programs, while a server may be writing.

Owns the read-only queries and their text forms. It must not change the file.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from minserve.economics.prices import money
from minserve.economics.rows import COLUMNS
from minserve.economics.schema import MIGRATIONS, LedgerError, schema_of

Form = Literal["table", "csv", "jsonl"]
GROUPS = (
    *("key", "user", "end_user", "feature", "run", "token", "pool", "model", "endpoint", "choices"),
    *("finish", "status", "code", "degraded", "day"),
)
_SUMMED = ("calls", "prompt_tokens", "cached_tokens", "completion_tokens", "max_tokens", "cost")
_SHORT = (
    *("time", "id", "user", "feature", "prompt_tokens", "completion_tokens", "cost"),
    *("ttft_ms", "total_ms", "finish", "status"),
)


@dataclass(frozen=True, slots=True)
class Filter:
    """Which rows: equal columns, and Unix seconds [since, until)."""

    since: float | None = None
    until: float | None = None
    key: str | None = None
    user: str | None = None
    end_user: str | None = None
    feature: str | None = None
    run: str | None = None
    pool: str | None = None
    finish: str | None = None
    status: int | None = None

    def where(self) -> tuple[str, list[object]]:
        parts, values = ["1"], list[object]()
        for column in ("key", "user", "end_user", "feature", "run", "pool", "finish", "status"):
            value = getattr(self, column)
            if value is not None:
                parts.append(f"{column} = ?")
                values.append(value)
        for operator, bound in ((">=", self.since), ("<", self.until)):
            if bound is not None:
                parts.append(f"time {operator} ?")
                values.append(bound)
        return " AND ".join(parts), values


@contextlib.contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """The ledger at `path`, read only. LedgerError if there is none, or it is of another schema."""
    if not path.is_file():
        raise LedgerError(f"There is no ledger at {path}.")
    try:
        database = sqlite3.connect(path.resolve().as_uri() + "?mode=ro", uri=True, timeout=5.0)
        with contextlib.closing(database):
            if schema_of(database, path) < len(MIGRATIONS):
                raise LedgerError(f"{path} was written by an older minserve; minserve serve brings it up to date.")
            yield database
    except sqlite3.Error as error:
        raise LedgerError(f"{path}: {error}") from None


def rows(database: sqlite3.Connection, chosen: Filter, limit: int | None = None) -> list[dict[str, object]]:
    """The latest rows that match, oldest first, by column name."""
    where, values = chosen.where()
    found = database.execute(
        f"SELECT {', '.join(COLUMNS)} FROM calls WHERE {where} ORDER BY seq DESC LIMIT ?",
        [*values, -1 if limit is None else limit],
    ).fetchall()
    return [dict(zip(COLUMNS, row, strict=True)) for row in reversed(found)]


def summary(database: sqlite3.Connection, chosen: Filter, by: Sequence[str]) -> list[dict[str, object]]:
    """Calls, tokens and cost per group, dearest first. by: of GROUPS."""
    unknown = [name for name in by if name not in GROUPS]
    if unknown:
        raise ValueError(f"can't group by {unknown[0]}; known: {', '.join(GROUPS)}")
    where, values = chosen.where()
    names = ["date(time, 'unixepoch') AS day" if name == "day" else name for name in by]
    sums = ["COUNT(*) AS calls", *(f"SUM({name}) AS {name}" for name in _SUMMED[1:])]
    found = database.execute(
        f"SELECT {', '.join([*names, *sums])} FROM calls WHERE {where}"
        f"{' GROUP BY ' + ', '.join(by) if by else ''} ORDER BY cost DESC, calls DESC",
        values,
    )
    return [dict(zip((*by, *_SUMMED), row, strict=True)) for row in found]


def text(records: Sequence[dict[str, object]], form: Form) -> str:
    """Records as a table for people (of rows only the main columns), as CSV or as JSON lines (all columns)."""
    if form == "jsonl":
        return "".join(json.dumps(record) + "\n" for record in records)
    if not records:
        return ""
    if form == "csv":
        out = io.StringIO()
        writer = csv.DictWriter(out, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _safe(value) for name, value in record.items()} for record in records)
        return out.getvalue()
    names = [name for name in _SHORT if name in records[0]] if "seq" in records[0] else list(records[0])
    return table(names, [[_shown(name, record[name]) for name in names] for record in records])


def table(names: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; numbers to the right."""
    cells = [list(names), *(list(line) for line in lines)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    numeric = [all(_is_number(line[i]) for line in cells[1:]) for i in range(len(names))]
    return "".join(
        "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(line, widths, numeric, strict=True)).rstrip()
        + "\n"
        for line in cells
    )


def _shown(name: str, value: object) -> str:
    if value is None:
        return "-"
    if name == "time" and isinstance(value, float):
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S")
    if name in ("cost", "reserved") and isinstance(value, int):
        return money(value)
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _safe(value: object) -> object:
    """Text that a spreadsheet would run as a formula gets a quote in front; clients choose these names."""
    return "'" + value if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.replace(".", "", 1).isdigit()
