"""Calls of an accounting as the gateway makes them, and what its counters and its ledger hold of them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from minserve.config import AccountConfig, Config, KeyConfig, LimitConfig, PricesConfig
from minserve.economics.accounting import Accounting
from minserve.economics.keys import Identity, digest
from minserve.economics.reservation import Admission
from minserve.economics.settlement import Settlement
from minserve.request import RequestError

PRICES = PricesConfig(prefill=1.0, cached=0.5, decode=2.0)
DONE = Settlement(finish="stop", status=200, prompt_tokens=5, completion_tokens=3)


def local(**fields: Any) -> Config:
    return Config(local=AccountConfig(**fields), prices=PRICES)


def day(**caps: Any) -> tuple[LimitConfig, ...]:
    return (LimitConfig(period="day", **caps),)


def keyed(limits: tuple[LimitConfig, ...] = (), **fields: Any) -> KeyConfig:
    return KeyConfig(sha256=digest("one").hex(), user="alice", limits=limits, **fields)


def call(accounting: Accounting, identity: Identity | None = None, **fields: Any) -> Admission:
    asked = {"id": "r", "prompt_tokens": 5, "max_tokens": 10, **fields}
    return Admission(identity=identity or accounting.identify(None), **asked)


def counters(accounting: Accounting) -> dict[object, object]:
    return {(scope, period): total for scope, period, total in accounting.counters.limiter}


async def refused(accounting: Accounting, admission: Admission) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await accounting.reserve(admission)
    accounting.refuse(admission, caught.value)
    return caught.value


def rows(folder: Path, columns: str = "*", where: str = "1") -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / "ledger.db")) as database:
        return database.execute(f"SELECT {columns} FROM calls WHERE {where} ORDER BY seq").fetchall()
