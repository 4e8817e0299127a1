"""Accounting as the gateway uses it: reserve, settle once, refuse; what a restart remembers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from minserve.config import AccountConfig, Config, LimitConfig
from minserve.economics.accounting import Accounting, Admission
from minserve.economics.settlement import Settlement
from minserve.request import RequestError


def test_fifty_calls_against_a_budget_for_two_admit_exactly_two(tmp_path: Path) -> None:  # bug: 66
    config = Config(local=AccountConfig(limits=(LimitConfig(period="day", requests=2),)))

    async def main() -> None:
        accounting = Accounting.open(config, tmp_path)
        me = accounting.identify(None)
        calls = [Admission(id=f"r{i}", identity=me, prompt_tokens=5, max_tokens=10) for i in range(50)]
        results = await asyncio.gather(*map(accounting.reserve, calls), return_exceptions=True)
        refused = [r for r in results if isinstance(r, RequestError)]
        assert len(refused) == 48
        assert {e.code for e in refused} == {"budget_exceeded"}
        for call, result in zip(calls, results, strict=True):
            if isinstance(result, RequestError):
                accounting.refuse(call, result)
            elif not isinstance(result, BaseException):
                result.settle(Settlement(finish="stop", status=200, prompt_tokens=5, completion_tokens=3))
        await accounting.close()

    asyncio.run(main())
