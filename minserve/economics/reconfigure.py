"""Other keys, caps and prices while calls run: nothing that was used is forgotten, no call is disturbed.

A part of Accounting, kept apart because it changes what the rest of it only reads. A cap whose period was not counted
so far finds what the ledger knows of it: counters are then made again as after a restart, with the calls that run now
on top. Without a ledger such a cap begins at zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from minserve.config import Config
from minserve.economics.caps import Scope
from minserve.economics.device import priced
from minserve.economics.history import SCOPE_COLUMNS, resets
from minserve.economics.keys import Keyring
from minserve.economics.limiter import Limiter
from minserve.economics.loops import Runs
from minserve.economics.payers import Payers
from minserve.economics.prices import Prices
from minserve.economics.queries import reading
from minserve.economics.restore import restore
from minserve.economics.spend import PromptDrift

if TYPE_CHECKING:
    from minserve.economics.accounting import Accounting


async def reconfigure(books: Accounting, config: Config) -> None:
    """Take over `keys`, `local`, `users`, `prices` and `spend`. ValueError or LedgerError, and nothing has changed.

    Calls that run keep the account they began with; they cost at most what they reserved.
    """
    prices = _prices(books, config)
    keys = Keyring(config.keys, config.local, books.tokens)
    payers = Payers(config, books._runs)
    if books.ledger is not None and not payers.counted <= books.payers.counted:
        await books.ledger.rest()
        payers = _recount(books, config)
    spend_changed = config.spend != books.config.spend
    books.config, books.prices, books.keys, books.payers = config, prices, keys, payers
    if spend_changed:
        books.watch_spend()
        books.budget.check(books.clock())


def _prices(books: Accounting, config: Config) -> Prices:
    if books.ledger is None:
        return Prices.of(config.prices)
    with reading(books.ledger.path) as database:
        return priced(config.prices, database, books.clock())


def _recount(books: Accounting, config: Config) -> Payers:
    """New counters from the ledger and the calls that run. No await in here: nothing else may be counted meanwhile."""
    assert books.ledger is not None
    now = books.clock()
    limiter = Limiter()
    runs = Runs(limiter, config.loops.run_idle_s)
    payers = Payers(config, runs)
    drift = PromptDrift(books.alerts, ratio=config.alerts.drift_ratio, least=config.alerts.drift_min_requests)
    with reading(books.ledger.path) as database:
        restore(database, limiter, payers, runs, drift, now, config.loops.run_idle_s)
        forgiven = {Scope(kind, name): at for kind in SCOPE_COLUMNS for name, at in resets(database, kind, now).items()}
    runs.take_over(books._runs)
    moved = []
    for identity, ticket in books._open.values():
        caller = replace(identity, run_calls=None, run_cost=None)  # what it declared is known by now
        paying = [payer for payer in payers.of(caller, now) if ticket.time > forgiven.get(payer.scope, 0.0)]
        moved.append((ticket, limiter.place(ticket, paying)))
    for ticket, places in moved:  # nothing fails from here on
        ticket.places = places
    books.limiter = books.budget.limiter = limiter
    books._runs, books._drift = runs, drift
    return payers
