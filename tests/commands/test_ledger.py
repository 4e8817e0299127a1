"""minserve ledger and cost: the same rows as the server wrote, also while it runs."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from minserve.config import AccountConfig, Config, LimitConfig, LimitsConfig, PricesConfig, SpendConfig, UserConfig
from minserve.economics.ledger import Ledger
from minserve.economics.prices import Prices
from minserve.economics.report import loosest
from minserve.economics.rows import Row
from tests.commands.conftest import Invoke
from tests.server.serving import keyed


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    """Open, as while a server runs; three users over two days."""
    found = Ledger(tmp_path / "data" / "ledger.db")
    for i, (user, hours, status) in enumerate([("ann", 40, 200), ("bob", 3, 200), ("ann", 2, 429), ("cy", 1, 200)], 1):
        done = status == 200
        found.put(
            Row(
                seq=found.number(),
                time=time.time() - hours * 3600,
                id=f"r{i}",
                user=user,
                feature="chat",
                pool="interactive",
                prompt_tokens=100 * done,
                completion_tokens=10 * i * done,
                max_tokens=100,
                cost=i * 10**9 * done,
                finish="stop" if done else "refused",
                status=status,
            )
        )
    await found.flush()
    yield found
    await found.close()


def test_rows_as_a_table_for_people(invoke: Invoke, ledger: Ledger) -> None:
    result = invoke("ledger")
    lines = result.stdout.splitlines()
    assert [line.split()[2] for line in lines[1:]] == ["r1", "r2", "r3", "r4"]
    assert lines[0].split()[:3] == ["time", "id", "user"]
    assert "rows are kept for ever" in result.stderr
    assert "kept 30 days" in invoke("ledger", "--set", "ledger.retention_days=30").stderr


def test_grouping_rows_is_refused_instead_of_ignored(invoke: Invoke, ledger: Ledger) -> None:
    result = invoke("ledger", "--by", "day")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "summary" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        (("--since", "24h"), ["r2", "r3", "r4"]),
        (("--since", "24h", "--until", "90m"), ["r2", "r3"]),
        (("--user", "ann"), ["r1", "r3"]),
        (("--status", "429"), ["r3"]),
        (("--finish", "stop", "--limit", "1"), ["r4"]),
        (("--key", "nobody"), []),
    ],
)
def test_filters(invoke: Invoke, ledger: Ledger, arguments: tuple[str, ...], ids: list[str]) -> None:
    result = invoke("ledger", "--format", "jsonl", *arguments)
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == ids
    assert result.stderr == ""  # nothing but rows for programs


def test_a_summary_as_csv(invoke: Invoke, ledger: Ledger) -> None:
    rows = list(csv.DictReader(io.StringIO(invoke("ledger", "summary", "--by", "user", "--format", "csv").stdout)))
    assert [(row["user"], row["calls"], row["cost"]) for row in rows] == [
        ("cy", "1", "4000000000"),
        ("bob", "1", "2000000000"),
        ("ann", "2", "1000000000"),
    ]


def test_a_summary_by_status(invoke: Invoke, ledger: Ledger) -> None:
    lines = invoke("ledger", "summary", "--by", "status", "--format", "jsonl").stdout.splitlines()
    assert {row["status"]: row["calls"] for row in map(json.loads, lines)} == {200: 3, 429: 1}


def test_a_data_folder_that_can_not_be_made_names_the_setting(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINSERVE_DATA", str(tmp_path / "file" / "data"))
    result = invoke("ledger")
    assert result.exit_code == 2
    assert "MINSERVE_DATA" in result.stderr


def test_what_can_not_be_shown_is_said(invoke: Invoke, tmp_path: Path) -> None:
    assert "There is no ledger at" in invoke("ledger").stderr
    (tmp_path / "minserve.toml").write_text('[ledger]\npath = "other.db"\n', encoding="utf-8")
    (tmp_path / "other.db").write_bytes(b"no database" * 100)
    for command in (("ledger",), ("cost",)):
        result = invoke(*command)
        assert result.exit_code == 2
        assert "other.db" in result.stderr


def test_an_unknown_group_is_refused(invoke: Invoke, ledger: Ledger) -> None:
    result = invoke("ledger", "summary", "--by", "id")
    assert (result.exit_code, "can't group by id" in result.stderr) == (2, True)


def test_cost_of_the_ledger(invoke: Invoke, ledger: Ledger, tmp_path: Path) -> None:
    prices = ("--set", "prices.prefill=1", "--set", "prices.decode=2")
    result = invoke("cost", "--price", "50", "--plot", "tail.svg", "--since", "30h", *prices)
    assert result.exit_code == 0, result.output
    assert "ledger: 3 users" in result.stdout  # ann's refused call is in the window, and cost nothing
    assert "max 120" in result.stdout  # 4 in a day, thirty times
    assert "at 50 USD a month" in result.stdout
    assert "no cap bounds what one user of local can cost" in result.stdout
    assert "[prices]" not in result.stdout
    assert "nothing has a price: set [prices]" in invoke("cost").stdout
    assert (tmp_path / "tail.svg").read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.parametrize(
    "option", ["--price=nan", "--price=inf", "--price=-1", "--plot=none/tail.svg", "--plot=tail.png"]
)
def test_what_cost_can_not_use_is_refused_by_name(invoke: Invoke, ledger: Ledger, option: str) -> None:
    result = invoke("cost", option)
    assert (result.exit_code, result.stdout) == (2, "")
    assert option.partition("=")[0] in result.stderr


@pytest.mark.parametrize("option", [f"--limit={2**63}", f"--status={2**63}", "--status=-1"])
def test_numbers_that_no_row_can_have_are_refused_by_name(invoke: Invoke, ledger: Ledger, option: str) -> None:
    result = invoke("ledger", option)
    assert (result.exit_code, result.stdout) == (2, "")
    assert option.partition("=")[0] in result.stderr


async def test_who_was_refused_without_a_name_is_no_user(invoke: Invoke, ledger: Ledger) -> None:
    """Strangers would halve the mean, and the time over which they knocked would stretch what users cost."""
    known = invoke("cost").stdout
    stranger = Row(seq=ledger.number(), time=time.time() - 90 * 86400, id="s", pool="interactive")
    stranger.finish, stranger.status = "refused", 401
    ledger.put(stranger)
    await ledger.flush()
    assert invoke("cost").stdout == known
    assert "no rows that match" in invoke("cost", "--status", "401").stderr


def test_cost_of_a_scenario(invoke: Invoke, tmp_path: Path) -> None:
    text = """
        price_per_user = 10.0
        limits = [{ period = "day", money = 0.1 }]
        [prices]
        prefill = 1.0
        decode = 4.0
        [users]
        count = 500
    """
    (tmp_path / "plan.toml").write_text(text, encoding="utf-8")
    result = invoke("cost", "plan.toml")
    assert "plan: 500 users" in result.stdout
    assert "at 10 USD a month" in result.stdout
    assert "the worst case is bounded by 0.1 USD per day" in result.stdout
    assert "at 3 USD a month" in invoke("cost", "plan.toml", "--price", "3").stdout
    (tmp_path / "plan.toml").write_text("users = 3", encoding="utf-8")
    assert "plan.toml" in invoke("cost", "plan.toml").stderr


def test_the_worst_case_is_that_of_the_loosest_account() -> None:
    tight, loose = LimitConfig(period="day", money=1.0), LimitConfig(period="day", money=5.0)
    config = Config(
        keys={"a": keyed("a", user="ann", limits=(tight,)), "b": keyed("b", user="bob", end_user_limits=(loose,))},
        users={"ann": UserConfig(limits=(loose,))},
    )
    free = Prices()
    assert bounds(config, free) == ("keys.b", ["5 USD per day"])
    assert bounds(config, free, "a") == ("keys.a", ["1 USD per day", "5 USD per day"])
    assert bounds(Config(), free) == ("local", [])
    with pytest.raises(ValueError, match="no key 'c'"):
        loosest(config, free, "c")


def bounds(config: Config, prices: Prices, key: str | None = None) -> tuple[str, list[str]]:
    account, found = loosest(config, prices, key)
    return account, [ceiling.name for ceiling in found]


def test_the_dearest_call_has_all_prompts_and_answers_unless_the_account_caps_its_cost() -> None:
    """Two prompts of 1,000 tokens with three answers of 500 each: 2,000 at 1 and 3,000 at 2 per million."""
    prices = Prices.of(PricesConfig(prefill=1.0, decode=2.0))
    limits = LimitsConfig(max_input_tokens=1000, max_prompts=2, max_n=3, max_tokens=500)
    account = AccountConfig(limits=(LimitConfig(period="day", requests=10),))
    config = Config(limits=limits, local=account)
    _, (worst,) = loosest(config, prices, None)
    assert worst.name == "10 requests per day"
    assert worst.cost == pytest.approx(30 * 10 * 0.008)
    capped = replace(config, local=replace(account, max_call_cost=0.002))
    assert loosest(capped, prices, None)[1][0].cost == pytest.approx(30 * 10 * 0.002)


def test_the_servers_limit_bounds_one_user_too(invoke: Invoke, ledger: Ledger) -> None:
    stdout = invoke("cost", "--set", "spend.limit=20").stdout
    assert "bounded by the server's limit of 20 USD per day: at most 600 USD" in stdout
    config = Config(
        spend=SpendConfig(limit=1.0, period="hour", rolling=True),
        local=AccountConfig(limits=(LimitConfig(period="day", money=5.0),)),
    )
    assert bounds(config, Prices())[1] == ["5 USD per day", "the server's limit of 1 USD in any hour"]
