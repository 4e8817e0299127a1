"""minserve keys: what is printed can be pasted, and what was made is let in."""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.config import KeyConfig, LimitConfig, PricesConfig, RunConfig, SpendConfig, UserConfig
from minserve.economics.accounting import Accounting
from minserve.economics.issue import key_table, parse_limit
from minserve.economics.keys import digest
from minserve.request import RequestError
from minserve.settings import load
from tests.commands.conftest import Invoke
from tests.server.serving import COMPLETION, keyed, serving


def test_the_secret_is_shown_once_and_the_table_holds_only_its_hash(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke(
        *("keys", "new", "web", "--user", "ann", "--feature", "chat", "--pool", "bulk", "--admin"),
        *("--also-pool", "interactive", "--limit", "day:tokens=1000,money=0.5", "--limit", "minute:requests=3"),
    )
    assert result.exit_code == 0, result.output
    secret = re.search(r"ms-\S+", result.stderr)
    assert secret is not None
    assert secret[0] not in result.stdout
    (tmp_path / "minserve.toml").write_text(result.stdout, encoding="utf-8")
    key = load(None, {}, {}).config.keys["web"]
    assert key == KeyConfig(
        sha256=digest(secret[0]).hex(),
        user="ann",
        feature="chat",
        pool="bulk",
        pools=("interactive",),
        admin=True,
        limits=(LimitConfig(period="day", tokens=1000, money=0.5), LimitConfig(period="minute", requests=3)),
    )


def test_a_key_without_a_name_gets_one(invoke: Invoke) -> None:
    tables = [tomllib.loads(invoke("keys", "new").stdout)["keys"] for _ in range(2)]
    names = [next(iter(table)) for table in tables]
    assert names[0] != names[1]
    assert tables[0][names[0]]["user"] == names[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--limit", "day"), "PERIOD:KIND=AMOUNT"),
        (("--limit", "year:tokens=1"), "minute, hour, day, month"),
        (("--limit", "day:coins=1"), "coins"),
        (("--limit", "day:tokens=-1"), "tokens"),
        (("--user", "a\nb"), "--user must be"),
    ],
)
def test_a_wrong_key_is_refused_by_name(invoke: Invoke, arguments: tuple[str, ...], message: str) -> None:
    result = invoke("keys", "new", "k", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


printable = st.text(st.characters(categories=("L", "M", "N", "P", "S", "Zs")), min_size=1, max_size=20)


@given(
    name=printable,
    user=printable,
    spend=st.none() | st.floats(0, 1e9),
    calls=st.none() | st.integers(1, 10**12),
)
def test_any_account_survives_being_written_as_toml(
    name: str, user: str, spend: float | None, calls: int | None
) -> None:
    key = KeyConfig(
        sha256="0" * 64,
        user=user,
        run=RunConfig(require_id=True, max_calls=calls, max_spend=spend),
        limits=(LimitConfig(period="month", rolling=True, money=spend),),
        max_call_cost=spend,
    )
    read = tomllib.loads(key_table(name, key))["keys"]
    assert msgspec.convert(read, dict[str, KeyConfig]) == {name: key}


def test_limits_of_several_kinds() -> None:
    assert parse_limit("hour:requests=2,money=1") == LimitConfig(period="hour", requests=2, money=1.0)


async def test_a_token_is_let_in_from_its_origin_until_it_ends(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "minserve.toml").write_text(invoke("keys", "new", "web", "--user", "ann").stdout, encoding="utf-8")
    result = invoke(
        *("keys", "token", "--key-name", "web", "--ttl", "10m", "--origin", "https://a.example"),
        *("--max-tokens", "50", "--user", "reader"),
    )
    assert result.exit_code == 0, result.output
    bearer = f"Bearer {result.stdout.strip()}"
    accounting = Accounting.open(load(None, {}, {}).config, tmp_path / "data")
    try:
        identity = accounting.identify(bearer, "https://a.example")
        assert (identity.key, identity.user, identity.end_user, identity.admin) == ("web", "ann", "reader", False)
        assert identity.token is not None
        assert identity.token.max_tokens == 50
        with pytest.raises(RequestError, match="another origin"):
            accounting.identify(bearer, "https://b.example")
        with pytest.raises(RequestError, match="expired"):
            accounting.keys.identify(bearer, "https://a.example", now=accounting.clock() + 601)
    finally:
        await accounting.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--key-name", "none"), "no key 'none'"),
        (("--ttl", "2h"), "3600 seconds"),
        (("--origin", "example.org"), "https://example.org"),
        (("--origin", "http://a.example/shop"), "nothing behind"),
        (("--max-tokens", "0"), "at least 1"),
    ],
)
def test_a_wrong_token_is_refused(invoke: Invoke, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "minserve.toml").write_text(invoke("keys", "new", "web").stdout, encoding="utf-8")
    asked = {"--key-name": "web", "--origin": "https://a.example", "--max-tokens": "5"} | {arguments[0]: arguments[1]}
    result = invoke("keys", "token", *(part for pair in asked.items() for part in pair))
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_an_origin_that_is_not_allowed_is_said(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "minserve.toml").write_text(invoke("keys", "new", "web").stdout, encoding="utf-8")
    asked = ("keys", "token", "--key-name", "web", "--origin", "https://a.example", "--max-tokens", "5")
    assert "server.allowed_origins does not list it" in invoke(*asked).stderr
    for listed in ("https://a.example", "https://A.example:443/"):
        assert invoke(*asked, "--set", f"server.allowed_origins={listed}").stderr == ""


ONE = (LimitConfig(period="day", requests=1),)
RESETS = {
    "server": (),
    "key": ("--key", "ann"),
    "user": ("--user", "ann"),
    "end_user": ("--key", "ann", "--end-user", "bob"),
    "run": ("--key", "ann", "--run", "r1"),
}


@pytest.mark.parametrize("scope", RESETS)
async def test_what_is_counted_is_reset_in_a_running_server(invoke: Invoke, scope: str) -> None:
    ann = keyed("ms-1", limits=ONE, end_user_limits=ONE, run=RunConfig(max_calls=1), admin=True)
    spend, prices = SpendConfig(limit=1.0), PricesConfig(decode=2.0)
    async with serving(keys={"ann": ann}, users={"ann": UserConfig(limits=ONE)}, spend=spend, prices=prices) as server:
        headers = {"Authorization": "Bearer ms-1", "X-Run-ID": "r1"}
        assert (await server.post("/v1/completions", COMPLETION | {"user": "bob"}, headers=headers))[0] == 200
        arguments = "keys", "reset", scope, *RESETS[scope], "--url", server.url, "--api-key", "ms-1"
        result = await asyncio.to_thread(invoke, *arguments)
        assert (result.exit_code, f"Reset: scope {scope}" in result.stdout) == (0, True), result.output
        again = await asyncio.to_thread(invoke, *arguments)
        assert (again.exit_code, "answers 404: Nothing is counted there." in again.stderr) == (2, True), again.output


async def test_a_reset_says_what_it_lacks(invoke: Invoke) -> None:
    async with serving(keys={"ann": keyed("ms-1", admin=True), "bob": keyed("ms-2")}) as server:
        for key, arguments, message in (
            ("ms-1", ("run", "--key", "ann"), "`run` is needed"),
            ("ms-2", ("key", "--key", "bob"), "--api-key"),
        ):
            result = await asyncio.to_thread(invoke, "keys", "reset", *arguments, "--url", server.url, "--api-key", key)
            assert (result.exit_code, message in result.stderr) == (2, True), result.output
