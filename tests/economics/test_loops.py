"""Loops: a run's budget, and the same prompt again and again without one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from minserve.config import Config, LoopsConfig, RunConfig
from minserve.economics.accounting import Accounting
from minserve.economics.keys import narrow
from minserve.economics.loops import prompt_digest
from tests.economics.calls import DONE, PRICES, call, keyed, local, refused


async def test_a_runaway_loop_stops_at_the_budget_its_first_call_declared(tmp_path: Path) -> None:
    accounting = Accounting.open(local(), tmp_path)
    caller = narrow(accounting.identify(None), {"X-Run-ID": "loop", "X-Run-Max-Calls": "3"}, None, None)
    for _ in range(3):
        (await accounting.reserve(call(accounting, caller))).settle(DONE)
    error = await refused(accounting, call(accounting, caller))
    assert (error.status, error.code, error.should_retry) == (429, "run_budget_exceeded", False)
    undeclared = narrow(accounting.identify(None), {"X-Run-ID": "loop"}, None, None)
    assert (await refused(accounting, call(accounting, undeclared))).code == "run_budget_exceeded"
    raised = narrow(accounting.identify(None), {"X-Run-ID": "loop", "X-Run-Max-Calls": "9"}, None, None)
    assert (await refused(accounting, call(accounting, raised))).code == "run_budget_changed"
    await accounting.close()
    again = Accounting.open(local(), tmp_path)
    assert (await refused(again, call(again, undeclared))).code == "run_budget_exceeded"
    await again.close()


async def test_a_keys_run_budget_bounds_what_a_run_may_declare(tmp_path: Path) -> None:
    config = Config(keys={"web": keyed(run=RunConfig(require_id=True, max_spend=50e-6))}, prices=PRICES)
    accounting = Accounting.open(config, tmp_path)
    me = accounting.identify("Bearer one")
    assert (await refused(accounting, call(accounting, me))).code == "run_id_required"
    generous = narrow(me, {"X-Run-ID": "a", "X-Run-Max-Spend": "100"}, None, None)
    for _ in range(2):
        await accounting.reserve(call(accounting, generous))
    assert (await refused(accounting, call(accounting, generous))).code == "run_budget_exceeded"
    await accounting.reserve(call(accounting, narrow(me, {"X-Run-ID": "b"}, None, None)))
    await accounting.close()


@pytest.mark.parametrize(("repeats", "stopped"), [("refuse", True), ("warn", False), ("off", False)])
async def test_the_same_prompt_without_a_run_id_is_noticed(tmp_path: Path, repeats: Any, stopped: bool) -> None:
    alerts: list[dict[str, object]] = []

    async def send(alert: dict[str, object]) -> None:
        alerts.append(alert)

    config = Config(loops=LoopsConfig(repeats=repeats, repeat_limit=3))
    accounting = Accounting.open(config, tmp_path, send_alert=send)
    same = [(1, 2, 3)]
    for _ in range(3):
        await accounting.reserve(call(accounting, prompts=same))
    if stopped:
        error = await refused(accounting, call(accounting, prompts=same))
        assert (error.status, error.code, error.should_retry) == (429, "loop_detected", False)
    else:
        for _ in range(5):
            await accounting.reserve(call(accounting, prompts=same))
    await accounting.reserve(call(accounting, prompts=[(1, 2), (3,)]))
    with_run = narrow(accounting.identify(None), {"X-Run-ID": "r"}, None, None)
    for _ in range(5):
        await accounting.reserve(call(accounting, with_run, prompts=same))
    await accounting.close()
    assert [a["kind"] for a in alerts] == ([] if repeats == "off" else ["loop"])


@pytest.mark.parametrize(("repeats", "run", "read"), [("warn", "", True), ("warn", "r", False), ("off", "", False)])
async def test_prompts_are_read_only_where_repeats_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeats: Any, run: str, read: bool
) -> None:
    digested: list[object] = []

    def watched(prompts: Sequence[Sequence[int]]) -> bytes:
        digested.append(prompts)
        return prompt_digest(prompts)

    monkeypatch.setattr("minserve.economics.loops.prompt_digest", watched)
    accounting = Accounting.open(Config(loops=LoopsConfig(repeats=repeats)), tmp_path)
    caller = narrow(accounting.identify(None), {"X-Run-ID": run}, None, None)
    await accounting.reserve(call(accounting, caller, prompts=[(1, 2)]))
    assert digested == [[(1, 2)]] * read
    await accounting.close()


def test_a_digest_tells_prompts_apart() -> None:
    prompts: list[list[tuple[int, ...]]] = [
        [(1, 2, 3)],
        [(1, 2), (3,)],
        [(1,), (2, 3)],
        [(1, 2), (3,), ()],
        [(3, 2, 1)],
    ]
    assert len({prompt_digest(each) for each in prompts}) == len(prompts)
    assert prompt_digest([[1, 2]]) == prompt_digest([(1, 2)])
