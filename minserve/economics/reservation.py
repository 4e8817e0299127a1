"""What a call asks for, and what it holds until it has ended.

Owns the promise that a reservation is settled once. Whose counters it holds is the accounting's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from minserve.economics.keys import Identity
from minserve.economics.limiter import Ticket
from minserve.economics.prices import money
from minserve.economics.rows import Row
from minserve.economics.settlement import Settlement
from minserve.economics.windows import ZERO, Amount
from minserve.request import Pool

_MOST = 2**31 - 1  # clients choose these numbers, and SQLite has 64 bits for their sums


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """A call as far as it is known: everything when it asks for a reservation, less when it is refused before.

    prompt_tokens: over all prompts. max_tokens, asked_max_tokens (None: nothing was asked): of one choice; choices: n
    times the number of prompts. prompts: their token ids, for the repeat detector. degraded: what was done to it under
    load, "" for nothing. started: time.monotonic() of its arrival, for the row's total_ms.
    """

    id: str
    identity: Identity | None
    endpoint: str = ""
    model: str = ""
    pool: Pool = Pool.INTERACTIVE
    prompt_tokens: int = 0
    max_tokens: int = 0
    asked_max_tokens: int | None = None
    choices: int = 1
    prompts: Sequence[Sequence[int]] = ()
    degraded: str = ""
    started: float | None = None

    def row(self, seq: int, now: float) -> Row:
        """The open row of this call; Unix seconds."""
        row = Row(
            seq=seq,
            time=now,
            id=self.id,
            pool=self.pool.value,
            model=self.model,
            endpoint=self.endpoint,
            asked_prompt=self.prompt_tokens,
            max_tokens=_bounded(self.max_tokens * self.choices),
            choices=_bounded(self.choices),
            degraded=self.degraded,
            asked_max_tokens=None if self.asked_max_tokens is None else _bounded(self.asked_max_tokens * self.choices),
        )
        identity = self.identity
        if identity is not None:
            row.key, row.user, row.end_user = identity.key, identity.user, identity.end_user
            row.feature, row.run = identity.feature, identity.run
            row.run_calls, row.run_cost = identity.run_calls, identity.run_cost
            row.token = identity.token.id if identity.token else ""
        return row


class Books(Protocol):
    """Where a reservation is settled: the accounting."""

    def price(self, row: Row, prompt: int, cached: int, completion: int) -> int: ...

    def settle(self, row: Row, ticket: Ticket, end: Settlement, started: float) -> Row: ...

    def release(self, row: Row, ticket: Ticket, actual: Amount) -> None: ...


class Reservation:
    """What a call may use at most. `settle` once it has ended, however it ended; later calls of it do nothing."""

    __slots__ = ("_books", "_started", "_ticket", "row")

    def __init__(self, books: Books, row: Row, ticket: Ticket, started: float) -> None:
        self._books = books
        self._ticket: Ticket | None = ticket
        self._started = started
        self.row = row

    @property
    def settled(self) -> bool:
        return self._ticket is None

    @property
    def cost(self) -> int:
        """Billionths of the currency: reserved until settled, then what it really was."""
        return self.row.cost if self.settled else self.row.reserved

    def headers(self) -> dict[str, str]:
        """What the call may cost, and what it did cost once that is known."""
        reserved = {"x-minserve-reserved-cost": money(self.row.reserved)}
        return reserved | ({"x-minserve-cost": money(self.row.cost)} if self.settled else {})

    def price(self, prompt: int, cached: int, completion: int) -> int:
        """What so much use costs, in billionths of the currency: what it will be settled at."""
        return self._books.price(self.row, prompt, cached, completion)

    def cancel(self) -> None:
        """Give everything back without a row: the call was refused after all."""
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            self._books.release(self.row, ticket, ZERO)

    def settle(self, settlement: Settlement) -> bool:
        """Count what was really used, give the rest back, write the row. False if that was done before."""
        if self._ticket is None:
            return False
        ticket, self._ticket = self._ticket, None
        self.row = self._books.settle(self.row, ticket, settlement, self._started)
        return True


def _bounded(number: int) -> int:
    return max(-_MOST, min(number, _MOST))
