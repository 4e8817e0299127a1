"""Rules between settings: each broken one is a sentence that names them, and the defaults break none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from minserve.config import Config
from minserve.config_rules import doubtful, validate

HASH = "ab" * 32
SHARES = {"token_share": 0.2, "kv_share": 0.3}


def test_the_defaults_are_sound() -> None:
    assert validate(Config()) == []
    assert doubtful(Config()) == []


def test_more_threads_than_the_cores_can_run_are_refused() -> None:
    config = msgspec.convert({"engine": {"threads": 9}}, Config)
    assert validate(config, cores=3) == []
    (broken,) = validate(config, cores=2)
    assert "engine.threads (9)" in broken


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("127.0.0.1", None),
        ("127.0.1.1", None),
        ("::1", None),
        ("localhost", None),
        ("0.0.0.0", "on all interfaces"),
        ("::", "on all interfaces"),
        ("10.0.0.5", "on 10.0.0.5"),
        ("box.example", "on box.example"),
    ],
)
def test_a_server_open_to_others_without_keys_is_doubtful(host: str, said: str | None) -> None:
    tree = {"server": {"host": host}}
    lines = doubtful(msgspec.convert(tree, Config))
    assert len(lines) == (said is not None)
    assert all(f"listening {said} without API keys" in line for line in lines)
    keys = {"a": {"sha256": HASH, "user": "u"}}
    assert doubtful(msgspec.convert({**tree, "keys": keys}, Config)) == []


def test_answers_that_may_shrink_but_never_do_are_doubtful() -> None:
    tree = {"local": {"allow_shrink": True}}
    (line,) = doubtful(msgspec.convert(tree, Config))
    assert "local.allow_shrink" in line
    assert "degradation.enabled" in line
    assert doubtful(msgspec.convert({**tree, "degradation": {"enabled": True}}, Config)) == []


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({"timeouts": {"step_s": 60}}, ["timeouts.step_s", "timeouts.token_gap_s"]),
        ({"timeouts": {"token_gap_s": 120}}, ["timeouts.token_gap_s", "timeouts.first_token_s"]),
        ({"timeouts": {"first_token_s": 570}}, ["timeouts.first_token_s", "timeouts.total_s"]),
        ({"timeouts": {"total_s": 700}}, ["timeouts.total_s", "timeouts.client_s"]),
        ({"timeouts": {"write_stall_s": 570}}, ["timeouts.write_stall_s", "timeouts.total_s"]),
        (
            {"pools": {"interactive": {**SHARES, "total_s": 10_000}}},
            ["pools.interactive.total_s", "timeouts.client_s"],
        ),
        (
            {"timeouts": {"write_stall_s": 200}, "pools": {"interactive": {**SHARES, "total_s": 190}}},
            ["timeouts.write_stall_s", "pools.interactive.total_s"],
        ),
        ({"timeouts": {"sse_keep_alive_s": 60}}, ["timeouts.sse_keep_alive_s", "timeouts.proxy_idle_s"]),
        (
            {"pools": {"interactive": {"queue_timeout_s": 120}}},
            ["pools.interactive.queue_timeout_s", "timeouts.first_token_s"],
        ),
        (
            {"pools": {"bulk": {**SHARES, "queue_timeout_s": 4000, "first_token_s": 3900, "total_s": 7200}}},
            ["pools.bulk.queue_timeout_s", "pools.bulk.first_token_s"],
        ),
        ({"pools": {"bulk": {**SHARES, "token_gap_s": 20}}}, ["timeouts.step_s", "pools.bulk.token_gap_s"]),
        ({"pools": {"bulk": {**SHARES, "token_share": 0.9, "queue_timeout_s": 20}}}, ["pools.*.token_share"]),
        ({"pools": {"interactive": {"max_num_seqs": 64, "token_share": 0.5}}}, ["pools.interactive.max_num_seqs"]),
        (
            {"server": {"allowed_origins": ["*", "localhost", "null", "a.example"]}},
            ["server.allowed_origins", "a.example"],
        ),
        ({"server": {"allowed_origins": ["https://a.example/", "http://a.example/x"]}}, ["'http://a.example/x'"]),
        ({"limits": {"default_max_tokens": 9999}}, ["limits.default_max_tokens", "limits.max_tokens"]),
        ({"engine": {"max_model_len": 1}}, ["engine.max_model_len"]),
        ({"engine": {"num_blocks": 1}}, ["engine.num_blocks"]),
        ({"keys": {"a": {"sha256": "abc", "user": "u"}}}, ["keys.a.sha256"]),
        (
            {"keys": {"a": {"sha256": HASH, "user": "u"}, "b": {"sha256": HASH.upper(), "user": "u"}}},
            ["keys.a", "keys.b"],
        ),
        ({"users": {"nobody": {}}}, ["users.nobody"]),
        ({"prices": {"decode": 20_000}}, ["prices.decode"]),
        ({"prices": {"prefill": 1, "cached": 2}}, ["prices.cached", "prices.prefill"]),
        ({"prices": {"device_hour": 2, "decode_tokens_per_s": 5}}, ["prices.prefill_tokens_per_s"]),
        ({"spend": {"limit": 5}}, ["spend.limit", "[prices]"]),
        ({"prices": {"decode": 1}, "spend": {"limit": 5, "alert_at": [0.8, 0.5]}}, ["spend.alert_at"]),
        (
            {"prices": {"decode": 1}, "spend": {"limit": 5, "period": "month"}, "ledger": {"retention_days": 7}},
            ["ledger.retention_days"],
        ),
        ({"degradation": {"shrink_at": 0.8}}, ["degradation.shrink_at", "degradation.pause_bulk_at"]),
    ],
)
def test_a_broken_rule_is_named(tree: dict[str, Any], names: list[str]) -> None:
    broken = validate(msgspec.convert(tree, Config))
    assert len(broken) == 1, broken
    assert all(name in broken[0] for name in names), broken


@pytest.mark.parametrize(
    ("tree", "name"),
    [
        ({"local": {"limits": [{"period": "day", "money": 0.1}]}}, "local.limits[0].money"),
        (
            {"keys": {"a": {"sha256": HASH, "user": "u", "end_user_limits": [{"period": "day", "money": 0.1}]}}},
            "keys.a.end_user_limits[0].money",
        ),
        ({"local": {"max_call_cost": 0.1}}, "local.max_call_cost"),
        ({"local": {"run": {"max_spend": 0.1}}}, "local.run.max_spend"),
        ({"users": {"local": {"limits": [{"period": "day", "money": 0.1}]}}}, "users.local.limits[0].money"),
    ],
)
def test_a_price_typo_that_would_lock_everybody_out_is_found(tree: dict[str, Any], name: str) -> None:  # bug: 65
    """Meant was 0.6 per million output tokens; somebody wrote 600."""
    sound = msgspec.convert({**tree, "prices": {"decode": 0.6}}, Config)
    typo = msgspec.convert({**tree, "prices": {"decode": 600}}, Config)
    assert validate(sound) == []
    (broken,) = validate(typo)
    assert broken.startswith(name)
    assert "nobody could call" in broken
