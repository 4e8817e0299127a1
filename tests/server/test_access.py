"""Who may call: pages of other origins, hosts, keys, and what a key allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minserve.config import (
    AccountConfig,
    LimitConfig,
    PricesConfig,
    RunConfig,
    ServerConfig,
    SpendConfig,
    UserConfig,
)
from minserve.economics.ledger import Ledger
from tests.server.fakes import FakeEngine, say
from tests.server.http import ANN, KEYS, ROOT, error, raw
from tests.server.serving import COMPLETION, Server, keyed, serving

PAGE = "https://page.example"


# -- browsers


# bug: 48
async def test_preflight_needs_no_key_and_errors_are_readable_for_listed_pages() -> None:
    async with serving(server=ServerConfig(allowed_origins=(PAGE,)), keys=KEYS) as server:
        question = {
            "Origin": PAGE,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
        }
        async with server.session.options(server.url + "/v1/chat/completions", headers=question) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert "x-stainless-os" in response.headers["Access-Control-Allow-Headers"]
        bad = {"Origin": PAGE, "Authorization": "Bearer wrong"}
        async with server.session.post(server.url + "/v1/completions", json=COMPLETION, headers=bad) as response:
            assert response.status == 401
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert "x-should-retry" in response.headers["Access-Control-Expose-Headers"]
        foreign = {**question, "Origin": "https://evil.example"}
        async with server.session.options(server.url + "/v1/chat/completions", headers=foreign) as response:
            assert response.status == 403
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_streams_carry_cors_headers_too() -> None:
    async with serving(server=ServerConfig(allowed_origins=(PAGE,))) as server:
        body = {**COMPLETION, "stream": True}
        async with server.session.post(server.url + "/v1/completions", json=body, headers={"Origin": PAGE}) as response:
            assert response.headers["Access-Control-Allow-Origin"] == PAGE


async def test_foreign_pages_and_rebound_names_are_refused(server: Server) -> None:
    status, reply = await server.post("/v1/completions", COMPLETION, headers={"Origin": "https://evil.example"})
    assert (status, error(403, reply)["code"]) == (403, "origin_not_allowed")
    for path in ("/status", "/", "/v1/models", "/missing"):
        status, reply = await server.get(path, headers={"Host": "evil.example"})
        assert (status, error(403, reply)["code"]) == (403, "host_not_allowed")
    await server.post("/v1/completions", COMPLETION, headers={"Host": "evil.example"})
    own = {"Origin": server.url}
    assert (await server.post("/v1/completions", COMPLETION, headers=own))[0] == 200
    assert len(server.engine.submissions) == 1
    assert all(row.total_ms is not None for row in server.rows)
    assert [(row.code, row.endpoint) for row in server.rows] == [
        ("origin_not_allowed", "/v1/completions"),
        ("host_not_allowed", "/v1/completions"),
        ("", "/v1/completions"),
    ]


# -- keys


# bug: 64
@pytest.mark.parametrize(
    "path",
    [
        *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/tiny", "/tokenize", "/detokenize"),
        *("/abort", "/metrics", "/status", "/version", "/v1/chat/completions/render", "/missing", "/docs"),
        "/limits/reset",
        *("//v1/models", "/V1/models", "/v1/models/", "/v1//models", "/./v1/models", "/static/../v1/models"),
        *("/%761/models", "/health/../v1/models", "/health/", "/HEALTH", "//health", "/static/", "/ready/x"),
        *("/v1/models?x=/health", "/health%2f..%2fstatus", "http://127.0.0.1/v1/models"),
    ],
)
async def test_without_a_key_nothing_but_the_open_routes_answers(path: str) -> None:
    async with serving(keys=KEYS) as server:
        for method in ("GET", "POST", "HEAD", "DELETE", "OPTIONS"):
            head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
            assert await raw(server, head.encode()) == 401


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic secret",
        "secret",
        "Bearer secret2",
        "Bearer sécret",
        "Bearer " + "x" * 5000,
    ],
)
async def test_wrong_keys_are_401(authorization: str) -> None:
    async with serving(keys=KEYS) as server:
        status, reply = await server.get("/v1/models", headers={"Authorization": authorization})
        assert (status, error(401, reply)["type"]) == (401, "authentication_error")


async def test_keys_open_routes_and_only_admins_see_the_numbers() -> None:
    async with serving(keys=KEYS) as server:
        for path in ("/health", "/ready"):
            assert (await server.get(path))[0] == 200
        async with server.session.get(server.url + "/") as page:
            assert page.status == 200
        assert (await server.get("/v1/models", headers=ANN))[0] == 200
        for path in ("/status", "/metrics"):
            status, reply = await server.get(path, headers=ANN)
            assert (status, error(403, reply)["code"]) == (403, "admin_required")
            async with server.session.get(server.url + path, headers=ROOT) as response:
                assert response.status == 200


ONE_A_DAY = (LimitConfig(period="day", requests=1),)
TIGHT = {
    "keys": {"ann": keyed("secret", user="ann", limits=ONE_A_DAY), "root": KEYS["root"]},
    "end_users": {"ann": keyed("secret", user="ann", end_user_limits=ONE_A_DAY), "root": KEYS["root"]},
    "runs": {"ann": keyed("secret", user="ann", run=RunConfig(max_calls=1)), "root": KEYS["root"]},
}


@pytest.mark.parametrize(
    ("sections", "scope"),
    [
        ({"keys": TIGHT["keys"]}, {"scope": "key", "key": "ann"}),
        ({"keys": KEYS, "users": {"ann": UserConfig(limits=ONE_A_DAY)}}, {"scope": "user", "user": "ann"}),
        ({"keys": TIGHT["end_users"]}, {"scope": "end_user", "key": "ann", "end_user": "bob"}),
        ({"keys": TIGHT["runs"]}, {"scope": "run", "key": "ann", "run": "r1"}),
        ({"keys": KEYS, "spend": SpendConfig(limit=40e-6), "prices": PricesConfig(decode=2.0)}, {"scope": "server"}),
        ({"local": AccountConfig(limits=ONE_A_DAY)}, {"scope": "key"}),
    ],
    ids=lambda value: value.get("scope", ""),
)
async def test_an_admin_can_reset_what_is_counted(sections: dict[str, Any], scope: dict[str, str]) -> None:
    """Sixteen tokens may cost 32 millionths: the server's limit has room for one call that is not settled at less."""
    engine = FakeEngine(say("x" * 16))
    headers = {**ANN, "X-Run-ID": "r1"}
    async with serving(engine, **sections) as server:
        for reset in (False, True):
            if reset:
                status, reply = await server.post("/limits/reset", scope, headers=ROOT)
                assert (status, reply["reset"]["scope"]) == (200, scope["scope"])
            for expected in (200, 429):
                status, _ = await server.post("/v1/completions", COMPLETION | {"user": "bob"}, headers=headers)
                assert status == expected


async def test_a_reset_is_on_the_disk_when_it_is_answered(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.db")
    async with serving(keys=TIGHT["keys"], book=ledger) as server:
        await server.post("/v1/completions", COMPLETION, headers=ANN)
        assert (await server.post("/limits/reset", {"scope": "key", "key": "ann"}, headers=ROOT))[0] == 200
        assert ledger.database.execute("SELECT kind, name FROM resets").fetchall() == [("key", '["ann"]')]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "scope"),
        ({"scope": "feature"}, 400, "scope"),
        ({"scope": "user"}, 400, "user"),
        ({"scope": "end_user", "key": "ann"}, 400, "end_user"),
        ({"scope": "run", "key": "ann", "run": 3}, 400, "run"),
        ({"scope": "key", "key": "typo"}, 404, "key"),
        ({"scope": "run", "key": "ann", "run": "typo"}, 404, "run"),
        ({"scope": "server"}, 404, "scope"),
    ],
)
async def test_a_reset_names_what_it_can_not_find_and_needs_an_admin(
    body: dict[str, Any], status: int, param: str
) -> None:
    async with serving(keys=TIGHT["keys"]) as server:
        found, reply = await server.post("/limits/reset", body, headers=ROOT)
        assert (found, error(status, reply)["param"]) == (status, param)
        found, reply = await server.post("/limits/reset", body, headers=ANN)
        assert (found, error(403, reply)["code"]) == (403, "admin_required")


async def test_tenants_have_caches_of_their_own_and_salts_chain_inside() -> None:
    async with serving(keys=KEYS) as server:
        for headers, salt in ((ANN, None), (ANN, "a"), (ROOT, None), (ROOT, "a"), (ANN, "b")):
            await server.post("/v1/completions", {**COMPLETION, "cache_salt": salt}, headers=headers)
        salts = [submission.salt for submission in server.engine.submissions]
        assert len(set(salts)) == 5
        status, reply = await server.post("/v1/completions", {**COMPLETION, "cache_salt": "x" * 129}, headers=ANN)
        assert (status, reply["error"]["param"]) == (400, "cache_salt")


async def test_a_key_clamps_priority_and_chooses_pools() -> None:
    keys = {"k": keyed("secret", min_priority=5, pools=("bulk",)), "plain": keyed("plain")}
    async with serving(keys=keys) as server:
        await server.post("/v1/completions", {**COMPLETION, "priority": -9, "pool": "bulk"}, headers=ANN)
        submission = server.engine.submissions[-1]
        assert (submission.priority, submission.pool) == (5, "bulk")
        other = {"Authorization": "Bearer plain"}
        status, reply = await server.post("/v1/completions", {**COMPLETION, "pool": "bulk"}, headers=other)
        assert (status, error(403, reply)["code"]) == (403, "pool_not_allowed")
