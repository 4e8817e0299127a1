"""What the ledger remembers of budgets: counters are rebuilt from it at start, so a restart forgives nothing.

Owns the queries that turn rows back into counters. Reads only. A call counts as one if it processed anything or got a
static text; so refused calls, and admitted ones that failed before any work, do not. Rows and resets from a far future
were written under a wrong clock and do not count.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from typing import NamedTuple

from minserve.economics.caps import Scope, ScopeKind
from minserve.economics.clock import BELIEVABLE_S
from minserve.economics.rows import REFUSED, STATIC
from minserve.economics.windows import Amount, Period

SCOPE_COLUMNS: dict[ScopeKind, tuple[str, ...]] = {  # what a scope of each kind is named by
    "server": (),
    "key": ("key",),
    "user": ("user",),
    "end_user": ("key", "end_user"),
    "token": ("token",),
    "run": ("key", "run"),
}
_USED = (
    f"SUM(prompt_tokens + completion_tokens > 0 OR finish = '{STATIC}'),"
    " SUM(prompt_tokens + completion_tokens), SUM(cost)"
)


def usage(
    database: sqlite3.Connection, kind: ScopeKind, period: Period, now: float, since: float | None = None
) -> Iterator[tuple[Scope, int, Amount]]:
    """(scope, bucket, amount) of one kind of scope, buckets of a scope in order.

    since: rows from then on; default: those that still count in the period.
    """
    columns = SCOPE_COLUMNS[kind]
    bucket = "0" if period.grain is None else f"CAST(time / {period.grain!r} AS INTEGER)"
    forgiven = resets(database, kind, now)
    since = period.since(now) if since is None else since
    for name, time in ((None, since), *forgiven.items()):
        where = ["time BETWEEN ? AND ?"]
        values: list[float | str] = [since, now + BELIEVABLE_S]
        if name is not None:
            where += ["time > ?", *(f"{column} = ?" for column in columns)]
            values += [time, *name]
        if kind in ("run", "token"):
            where.append(f"{kind} <> ''")
        names = ", ".join((*columns, "bucket"))
        rows = database.execute(
            f"SELECT {', '.join((*columns, ''))} {bucket} AS bucket, {_USED} FROM calls"
            f" WHERE {' AND '.join(where)} GROUP BY {names} ORDER BY bucket",
            values,
        )
        for *found, at, requests, tokens, cost in rows:
            if name is None and tuple(found) in forgiven:
                continue
            number = period.bucket(now) if period.grain is None else at
            yield Scope(kind, tuple(found)), number, Amount(requests, tokens, cost)


def resets(database: sqlite3.Connection, kind: ScopeKind, now: float) -> dict[tuple[str, ...], float]:
    """The scopes of a kind that were set to zero, and until when calls no longer count against them. Unix seconds."""
    last = database.execute(
        "SELECT name, MAX(time) FROM resets WHERE kind = ? AND time <= ? GROUP BY name", (kind, now + BELIEVABLE_S)
    )
    return {tuple(json.loads(name)): time for name, time in last}


def reset_statement(scope: Scope, now: float) -> tuple[str, tuple[float, str, str]]:
    """SQL that remembers that a scope was set to zero: rows up to `now` no longer count against it."""
    return "INSERT INTO resets VALUES (?, ?, ?)", (now, scope.kind, json.dumps(scope.name))


class Run(NamedTuple):
    """A run that may go on after a restart, what it has used, and the budget its first call declared."""

    key: str
    run: str
    last: float
    used: Amount
    declared: tuple[int | None, int | None]


def runs(database: sqlite3.Connection, now: float, idle_s: float) -> Iterator[Run]:
    """Runs that were active in the last `idle_s` seconds. What a refused call declared binds nobody."""
    forgiven = resets(database, "run", now)
    for key, run, last in database.execute(
        "SELECT key, run, MAX(time) FROM calls WHERE run <> '' AND time >= ? GROUP BY key, run", (now - idle_s,)
    ).fetchall():
        declared = database.execute(
            "SELECT run_calls, run_cost FROM calls WHERE key = ? AND run = ?"
            " AND (run_calls IS NOT NULL OR run_cost IS NOT NULL) AND finish <> ? ORDER BY seq LIMIT 1",
            (key, run, REFUSED),
        ).fetchone()
        used = database.execute(
            f"SELECT {_USED} FROM calls WHERE key = ? AND run = ? AND time > ?",
            (key, run, forgiven.get((key, run), 0.0)),
        ).fetchone()
        yield Run(key, run, last, Amount(*(value or 0 for value in used)), declared or (None, None))


def prompt_lengths(database: sqlite3.Connection, since: float) -> Iterator[tuple[str, int, int, int]]:
    """(feature, hour, calls, prompt tokens asked) of admitted calls, in order of hours."""
    yield from database.execute(
        "SELECT feature, CAST(time / 3600 AS INTEGER) AS hour, COUNT(*), SUM(asked_prompt) FROM calls"
        " WHERE time >= ? AND prompt_tokens > 0 GROUP BY feature, hour ORDER BY hour",
        (since,),
    )
