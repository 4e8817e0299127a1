"""What a server knows again after a restart: every counter, run and mean length, from the ledger.

Owns nothing. It runs once, before anything is served.
"""

from __future__ import annotations

import sqlite3

from minserve.economics import history
from minserve.economics.caps import Scope
from minserve.economics.limiter import Limiter
from minserve.economics.loops import LIFE, Runs
from minserve.economics.payers import Payers
from minserve.economics.spend import WEEK_S, PromptDrift
from minserve.economics.tokens import MAX_TTL_S


def restore(
    database: sqlite3.Connection,
    limiter: Limiter,
    payers: Payers,
    runs: Runs,
    drift: PromptDrift,
    now: float,
    run_idle_s: float,
) -> None:
    for kind, periods in payers.periods().items():
        for period in periods:
            for scope, bucket, amount in history.usage(database, kind, period, now):
                limiter.counter(scope, period).restore(bucket, amount)
    for scope, bucket, amount in history.usage(database, "token", LIFE, now, since=now - MAX_TTL_S):
        limiter.restore_life(scope, LIFE, bucket, amount, until=now + MAX_TTL_S)
    for run in history.runs(database, now, run_idle_s):
        if run.declared != (None, None):
            runs.restore(run.key, run.run, run.declared)
        elif not payers.caps_runs(run.key):
            runs.began(run.key, run.run, now)
            continue
        limiter.restore_life(Scope("run", (run.key, run.run)), LIFE, 0, run.used, until=run.last + run_idle_s)
    for feature, hour, calls, tokens in history.prompt_lengths(database, now - WEEK_S):
        drift.restore(feature, hour, calls, tokens)
