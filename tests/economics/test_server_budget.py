"""The server's own limit: it refuses everybody, and alerts once per threshold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minserve.config import Config, SpendConfig
from minserve.economics.accounting import Accounting
from minserve.economics.caps import Scope
from minserve.economics.settlement import Settlement
from tests.economics.calls import DONE, PRICES, call, refused


async def test_the_servers_limit_refuses_and_alerts_once_per_threshold(tmp_path: Path) -> None:
    alerts: list[dict[str, object]] = []

    async def send(alert: dict[str, object]) -> None:
        alerts.append(alert)

    config = Config(prices=PRICES, spend=SpendConfig(limit=110e-6))
    accounting = Accounting.open(config, tmp_path, send_alert=send)
    for _ in range(8):  # 11 millionths each, 25 reserved
        (await accounting.reserve(call(accounting))).settle(DONE)
    error = await refused(accounting, call(accounting))
    assert (error.status, error.code, error.should_retry) == (429, "server_budget_exceeded", False)
    assert (await refused(accounting, call(accounting))).code == "server_budget_exceeded"
    await accounting.close()
    values = [a["values"] for a in alerts]
    assert [v["threshold"] for v in values if isinstance(v, dict)] == [0.5, 0.8, 1.0]
    again = Accounting.open(config, tmp_path, send_alert=send)
    (await again.reserve(call(again, prompt_tokens=1, max_tokens=1))).settle(Settlement(finish="stop", status=200))
    await again.close()
    assert len(alerts) == 3


async def test_alerts_begin_anew_with_a_reset_whatever_runs_meanwhile(tmp_path: Path) -> None:
    shares: list[object] = []

    async def send(alert: dict[str, Any]) -> None:
        shares.append(alert["values"]["threshold"])

    config = Config(prices=PRICES, spend=SpendConfig(limit=110e-6))
    accounting = Accounting.open(config, tmp_path, send_alert=send)
    running = [await accounting.reserve(call(accounting)) for _ in range(4)]  # 25 millionths each
    await refused(accounting, call(accounting))
    assert accounting.reset(Scope("server"))
    for _ in range(5):  # 11 each
        (await accounting.reserve(call(accounting))).settle(DONE)
    assert accounting.spent_share == 0.5
    for reservation in running:  # forgiven
        reservation.settle(DONE)
    assert accounting.spent_share == 0.5
    assert accounting.reset(Scope("server"))
    for _ in range(4):
        await accounting.reserve(call(accounting))
    await refused(accounting, call(accounting))
    await accounting.close()
    assert shares == [1.0, 0.5, 1.0]
