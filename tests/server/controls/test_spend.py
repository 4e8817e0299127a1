"""Control 5: the server's own limit stops everybody."""

from __future__ import annotations

from typing import Any

from minserve.config import SpendConfig
from tests.server.controls.caller import PRICES, calling, of
from tests.server.serving import keyed


async def test_the_servers_spending_limit_stops_everybody_and_alerts_on_the_way() -> None:
    told: list[Any] = []

    async def send(alert: dict[str, Any]) -> None:
        told.append(alert["values"]["threshold"])

    spend = SpendConfig(limit=0.003, period="day")  # 30 tokens: five calls
    async with calling(prices=PRICES, spend=spend, keys={"b": keyed("other", user="bea")}) as caller:
        caller.server.services.accounting.alerts._send = send
        other = of(caller, "other")
        for each in (caller, other, caller, other, caller):
            await each.ask()
        for each in (caller, other):
            error = await each.refused(each.ask(), 429, "server_budget_exceeded")
            assert error.response.headers["x-should-retry"] == "false"
            assert error.response.headers["retry-after"] == "57590"
            assert "The server's spending limit" in error.message
        assert told == [0.5, 0.8, 1.0]


async def test_a_call_that_could_cost_more_than_is_left_is_refused_before_it_runs() -> None:
    async with calling(prices=PRICES, spend=SpendConfig(limit=0.003)) as caller:
        await caller.ask()
        await caller.refused(caller.ask(tokens=100), 429, "server_budget_exceeded")
        await caller.ask()
