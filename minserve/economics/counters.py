"""Everything that is counted of calls, as one: the limiter, who pays under which caps, runs, lengths of prompts.

Owns how all of it is known again: after a restart from the ledger, and under other caps from the ledger and the calls
that run. It must not know prices or rows.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from msgspec.structs import replace

from minserve.config import Config
from minserve.economics import history
from minserve.economics.alerts import Alerts
from minserve.economics.caps import Scope, Window
from minserve.economics.keys import Identity
from minserve.economics.limiter import Limiter, Ticket
from minserve.economics.loops import LIFE, Runs
from minserve.economics.payers import Payers
from minserve.economics.spend import WEEK_S, PromptDrift
from minserve.economics.tokens import MAX_TTL_S
from minserve.economics.windows import Amount


class Counters:
    """payers may be replaced by some that count in no further period. Times in Unix seconds."""

    def __init__(self, config: Config, alerts: Alerts) -> None:
        self.limiter = Limiter()
        self.runs = Runs(self.limiter, config.loops.run_idle_s)
        self.payers = Payers(config, self.runs)
        self.drift = PromptDrift(alerts, ratio=config.alerts.drift_ratio, least=config.alerts.drift_min_requests)
        self._run_idle_s = config.loops.run_idle_s

    def take(self, identity: Identity, amount: Amount, now: float) -> Ticket:
        """Count a call against every cap that it has. RequestError if one is reached; nothing is counted then."""
        ticket = self.limiter.take(self.payers.of(identity, now), amount, now)
        self.runs.began(identity.key, identity.run, now)
        return ticket

    def shown(self, identity: Identity) -> list[Window]:
        """The windows whose room a caller may see."""
        return self.limiter.windows(self.payers.shown(identity))

    def forget(self, scope: Scope, now: float) -> bool:
        """Begin again at zero. False if nothing is counted there. What a run has declared stays declared."""
        if not self.limiter.knows(scope):
            return False
        self.limiter.forget(scope)
        if scope.kind == "run":
            key, run = scope.name
            self.runs.began(key, run, now)
        return True

    def restore(self, database: sqlite3.Connection, now: float) -> None:
        """What the ledger remembers. Once, before anything is counted."""
        for kind, periods in self.payers.periods().items():
            for period in periods:
                for scope, bucket, amount in history.usage(database, kind, period, now):
                    self.limiter.counter(scope, period).restore(bucket, amount)
        for scope, bucket, amount in history.usage(database, "token", LIFE, now, since=now - MAX_TTL_S):
            self.limiter.restore_life(scope, LIFE, bucket, amount, until=now + MAX_TTL_S)
        for run in history.runs(database, now, self._run_idle_s):
            self._restore_run(run, now)
        for feature, hour, calls, tokens in history.prompt_lengths(database, now - WEEK_S):
            self.drift.restore(feature, hour, calls, tokens)

    def _restore_run(self, run: history.Run, now: float) -> None:
        if run.declared != (None, None):
            self.runs.restore(run.key, run.run, run.declared)
        elif not self.payers.caps_runs(run.key):
            self.runs.began(run.key, run.run, now)
            return
        scope = Scope("run", (run.key, run.run))
        self.limiter.restore_life(scope, LIFE, 0, run.used, until=run.last + self._run_idle_s)

    def take_over(
        self, before: Counters, running: Iterable[tuple[Identity, Ticket]], database: sqlite3.Connection, now: float
    ) -> None:
        """Restored, go on with the calls that still run and what was known of runs. Tickets are ours afterwards.

        RequestError if a call could not be counted here; no ticket has changed then.
        """
        forgiven = {
            Scope(kind, name): at
            for kind in history.SCOPE_COLUMNS
            for name, at in history.resets(database, kind, now).items()
        }
        self.runs.take_over(before.runs)
        moved = []
        for identity, ticket in running:
            caller = replace(identity, run_calls=None, run_cost=None)  # what it declared is known by now
            paying = [payer for payer in self.payers.of(caller, now) if ticket.time > forgiven.get(payer.scope, 0.0)]
            moved.append((ticket, self.limiter.place(ticket, paying)))
        for ticket, places in moved:  # nothing fails from here on
            ticket.places = places
