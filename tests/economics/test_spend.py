"""Alerts: once per threshold and window, on drifting prompts, delivered with retries and never in the way."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from minserve.economics.alerts import MAX_WAITING, Alert, Alerts
from minserve.economics.spend import PromptDrift, SpendAlerts


class Collected(Alerts):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Alert] = []

    def __call__(self, alert: Alert) -> None:
        self.seen.append(alert)


def spend(alerts: Alerts) -> SpendAlerts:
    return SpendAlerts(alerts, 100, (0.5, 0.8, 1.0), "USD", "per day")


def test_each_threshold_alerts_once_and_again_in_the_next_window() -> None:
    alerts = Collected()
    watch = spend(alerts)
    for spent in (10, 49, 50, 55, 85, 79, 81, 100, 100):
        watch.check(spent, 0.0)
    assert [a.values["threshold"] for a in alerts.seen] == [0.5, 0.8, 1.0]
    watch.check(0, 1.0)  # a new window
    watch.check(100, 2.0)
    assert [a.values["threshold"] for a in alerts.seen[3:]] == [0.5, 0.8, 1.0]


def test_a_refused_call_means_the_limit_is_reached_although_reservations_may_come_back() -> None:
    alerts = Collected()
    watch = spend(alerts)
    watch.exhausted(60, 0.0)
    watch.exhausted(60, 0.0)
    assert [a.values["threshold"] for a in alerts.seen] == [1.0]


def test_what_was_said_before_a_restart_is_not_said_again() -> None:
    alerts = Collected()
    watch = spend(alerts)
    watch.restore(85)
    watch.check(86, 0.0)
    assert alerts.seen == []


HOUR = 3600.0


def drift(alerts: Alerts) -> PromptDrift:
    return PromptDrift(alerts, ratio=1.5, least=20)


def test_a_feature_whose_prompts_grow_is_noticed_once_a_day() -> None:
    alerts = Collected()
    watch = drift(alerts)
    for i in range(100):
        watch.observe("chat", 100, i * HOUR)
    for i in range(60):
        watch.observe("chat", 400, 101 * HOUR + i)
    assert [a.values["feature"] for a in alerts.seen] == ["chat"]
    assert alerts.seen[0].values["week"] == 100
    assert alerts.seen[0].values["mean"] == 400
    assert "4.00 times" in alerts.seen[0].message


def test_steady_prompts_few_calls_and_forgotten_weeks_raise_no_alert() -> None:
    alerts = Collected()
    steady, few, old = drift(alerts), drift(alerts), drift(alerts)
    for i in range(200):
        steady.observe("chat", 100 + i % 40, i * HOUR)
    for _ in range(19):
        few.observe("chat", 10, 0.0)
    few.observe("chat", 1000, 1.0)
    for _ in range(40):
        old.observe("chat", 10, 0.0)
    for i in range(40):
        old.observe("chat", 1000, 8 * 24 * HOUR + i)
    assert alerts.seen == []


def test_shorter_prompts_are_a_change_too_and_a_restart_remembers_the_week() -> None:
    alerts = Collected()
    watch = drift(alerts)
    for hour in range(24):
        watch.restore("chat", hour, 10, 10_000)
    for i in range(20):
        watch.observe("chat", 100, 25 * HOUR + i)
    assert "0.10 times" in alerts.seen[0].message


def test_names_that_clients_make_up_do_not_stop_a_feature_from_being_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minserve.economics.spend._MAX_FEATURES", 10)
    alerts = Collected()
    watch = drift(alerts)
    for i in range(30):
        watch.observe(f"made up {i}", 1, i)
    for i in range(100):
        watch.observe("chat", 100 if i < 60 else 400, i * HOUR)
        watch.observe(f"made up {30 + i}", 1, i * HOUR)
    assert [a.values["feature"] for a in alerts.seen] == ["chat"]


ALERT = Alert("spend", "half is gone", 1.0, {"threshold": 0.5})


async def test_an_alert_is_logged_and_sent_again_until_it_arrives(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[dict[str, Any]] = []

    async def send(alert: dict[str, object]) -> None:
        tries.append(alert)
        if len(tries) < 3:
            raise ConnectionError("refused")

    alerts = Alerts(send, attempts=5, first_delay_s=0.001)
    with caplog.at_level(logging.WARNING):
        alerts(ALERT)
        await asyncio.sleep(0.05)
    await alerts.close()
    assert len(tries) == 3
    assert tries[-1] == {"kind": "spend", "message": "half is gone", "time": 1.0, "values": {"threshold": 0.5}}
    assert "half is gone" in caplog.text


async def test_a_dead_webhook_costs_alerts_not_memory_and_not_time() -> None:
    stuck = asyncio.Event()

    async def send(alert: dict[str, object]) -> None:
        await stuck.wait()

    alerts = Alerts(send, attempts=1)
    for _ in range(3 * MAX_WAITING):
        alerts(ALERT)
    await asyncio.sleep(0)
    assert len(alerts._waiting) <= MAX_WAITING
    started = asyncio.get_running_loop().time()
    await alerts.close(timeout=0.01)
    await alerts.close()
    assert asyncio.get_running_loop().time() - started < 1.0
