"""Other keys, caps and prices while calls run: nothing that was used is forgotten, no call is disturbed.

A part of Accounting, kept apart because it changes what the rest of it only reads. A cap whose period was not counted
so far finds what the ledger knows of it: counters are then made again as after a restart, with the calls that run now
on top. Without a ledger such a cap begins at zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minserve.config import Config
from minserve.economics.counters import Counters
from minserve.economics.device import priced
from minserve.economics.keys import Keyring
from minserve.economics.payers import Payers
from minserve.economics.prices import Prices
from minserve.economics.queries import reading

if TYPE_CHECKING:
    from minserve.economics.accounting import Accounting


async def reconfigure(books: Accounting, config: Config) -> None:
    """Take over `keys`, `local`, `users`, `prices` and `spend`.

    ValueError, LedgerError or RequestError, and nothing has changed. Calls that run keep the account they began with;
    they cost at most what they reserved.
    """
    prices = _prices(books, config)
    keys = Keyring(config.keys, config.local, books.tokens)
    counters, payers = books.counters, Payers(config, books.counters.runs)
    if books.ledger is not None and not payers.counted <= counters.payers.counted:
        await books.ledger.rest()
        counters, payers = _recounted(books, config)
    spend_changed = config.spend != books.config.spend
    books.config, books.prices, books.keys, books.counters = config, prices, keys, counters
    counters.payers, books.budget.limiter = payers, counters.limiter
    if spend_changed:
        books.watch_spend()
        books.budget.check(books.clock())


def _prices(books: Accounting, config: Config) -> Prices:
    if books.ledger is None:
        return Prices.of(config.prices)
    with reading(books.ledger.path) as database:
        return priced(config.prices, database, books.clock())


def _recounted(books: Accounting, config: Config) -> tuple[Counters, Payers]:
    """New counters from the ledger and the calls that run. No await in here: nothing else may be counted meanwhile."""
    assert books.ledger is not None
    now = books.clock()
    counters = Counters(config, books.alerts)
    with reading(books.ledger.path) as database:
        counters.restore(database, now)
        counters.take_over(books.counters, books._open.values(), database, now)
    return counters, counters.payers
