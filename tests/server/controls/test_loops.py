"""Control 4: loops stop at their run's budget, or when they repeat themselves."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import openai
import pytest

from minserve.config import LoopsConfig, RunConfig
from tests.server.controls.caller import PRICES, calling
from tests.server.serving import keyed


async def test_a_runaway_loop_stops_at_the_budget_its_first_call_declared() -> None:
    async with calling(prices=PRICES) as caller:
        run: dict[str, Any] = {"extra_headers": {"X-Run-ID": "agent-1", "X-Run-Max-Calls": "5"}}

        async def runaway() -> None:
            for call in itertools.count():
                await caller.ask(f"step {call}", **run)

        with pytest.raises(openai.RateLimitError) as stopped:
            await runaway()
        assert stopped.value.code == "run_budget_exceeded"
        assert stopped.value.response.headers["x-should-retry"] == "false"
        assert [row.finish for row in caller.server.rows] == ["length"] * 5 + ["refused"]
        await caller.refused(caller.ask(extra_headers={"X-Run-ID": "agent-1"}), 429, "run_budget_exceeded")
        await caller.ask(extra_headers={"X-Run-ID": "agent-2"})
        assert [row.run for row in caller.server.rows] == ["agent-1"] * 7 + ["agent-2"]


async def test_a_runs_money_is_bounded_too_and_its_budget_can_not_be_raised() -> None:
    async with calling(prices=PRICES) as caller:
        first = {"metadata": {"run_id": "r", "run_max_spend": "0.0015"}}
        await caller.ask(extra=first)
        await caller.ask(extra={"metadata": {"run_id": "r"}})
        await caller.refused(caller.ask(extra={"metadata": {"run_id": "r"}}), 429, "run_budget_exceeded")
        raised = {"metadata": {"run_id": "r", "run_max_spend": "5"}}
        await caller.refused(caller.ask(extra=raised), 400, "run_budget_changed")


async def test_a_key_can_bound_every_run_and_want_one_named() -> None:
    key = keyed("secret", run=RunConfig(require_id=True, max_calls=2))
    async with calling(key) as caller:
        error = await caller.refused(caller.ask(), 400, "run_id_required")
        assert "X-Run-ID" in error.message
        run: dict[str, Any] = {
            "extra_headers": {"X-Run-ID": "r", "X-Run-Max-Calls": "100"}
        }  # asking for more changes nothing
        await caller.ask(**run)
        await caller.ask(**run)
        await caller.refused(caller.ask(**run), 429, "run_budget_exceeded")


async def test_a_run_of_many_calls_at_once_stops_at_its_budget_too() -> None:
    key = keyed("secret", run=RunConfig(max_calls=4))
    async with calling(key) as caller:
        run: dict[str, Any] = {"extra_headers": {"X-Run-ID": "r"}}
        replies = await asyncio.gather(*(caller.ask(**run) for _ in range(20)), return_exceptions=True)
        assert sum(not isinstance(reply, BaseException) for reply in replies) == 4


async def test_the_same_prompt_again_and_again_without_a_run_is_a_loop() -> None:
    loops = LoopsConfig(repeats="refuse", repeat_limit=3, repeat_window_s=30)
    async with calling(loops=loops) as caller:
        for _ in range(3):
            await caller.ask("again")
        error = await caller.refused(caller.ask("again"), 429, "loop_detected")
        assert error.response.headers["x-should-retry"] == "false"
        assert error.response.headers["retry-after"] == "30"
        await caller.ask("something else")
        await caller.ask("again", extra_headers={"X-Run-ID": "r"})
