"""The cost model: the tail, the margin, the cap that bounds the worst case; from a scenario and from a ledger."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from minserve.config import LimitConfig, PricesConfig
from minserve.economics.costs import Device, Margin, Spread, ceilings
from minserve.economics.device import DeviceHours
from minserve.economics.ledger import Ledger
from minserve.economics.plot import tail_plot
from minserve.economics.prices import Prices
from minserve.economics.queries import Filter, reading
from minserve.economics.report import of_ledger, of_scenario
from minserve.economics.rows import Row
from minserve.economics.scenario import Scenario, load
from minserve.request import Pool
from tests.observe.records import step

SCENARIO = """
price_per_user = 10
[prices]
prefill = 0.5
cached = 0.1
decode = 2.0
[call]
system_tokens = 600
retrieved_tokens = 1400
user_tokens = 100
output_tokens = 300
cached_share = 0.5
[users]
count = 2000
requests_per_day = 20
sigma = 1.5
[[limits]]
period = "day"
money = 0.5
[[limits]]
period = "minute"
requests = 10
"""


def scenario(tmp_path: Path, text: str = SCENARIO) -> Scenario:
    (tmp_path / "s.toml").write_text(text)
    return load(tmp_path / "s.toml")


def test_a_scenarios_median_user_costs_what_its_calls_cost(tmp_path: Path) -> None:
    """A call: 1,100 prompt tokens at 0.5, 1,000 cached at 0.1, 300 output at 2 per million = 0.00125."""
    report = of_scenario(scenario(tmp_path))
    assert report.spread.p50 == pytest.approx(0.00125 * 20 * 30, rel=0.01)
    assert report.spread.p99 == pytest.approx(0.75 * 2.718281828 ** (1.5 * 2.326), rel=0.05)
    assert report.spread.most > 100
    assert report.spread.top_share > 0.15
    assert report.margin is not None
    assert 0.03 < report.margin.losing < 0.06
    assert report.ceilings[0].name == "0.5 USD per day"
    assert report.ceilings[0].cost == pytest.approx(15.0)
    text = "\n".join(report.lines())
    assert "2000 users" in text
    assert "bounded by 0.5 USD per day: at most 15 USD" in text


def test_a_scenario_gives_the_same_numbers_every_time(tmp_path: Path) -> None:
    assert of_scenario(scenario(tmp_path)).costs == of_scenario(scenario(tmp_path)).costs


def test_without_a_tail_all_users_cost_the_same(tmp_path: Path) -> None:
    spread = of_scenario(scenario(tmp_path, SCENARIO.replace("sigma = 1.5", "sigma = 0"))).spread
    assert spread.p50 == spread.most == pytest.approx(spread.mean)
    assert spread.top_share == pytest.approx(0.01)


def test_without_caps_the_report_says_that_nothing_bounds_the_worst_case(tmp_path: Path) -> None:
    report = of_scenario(scenario(tmp_path, SCENARIO.split("[[limits]]", maxsplit=1)[0]))
    assert "no cap bounds what one user can cost" in "\n".join(report.lines())


@pytest.mark.parametrize(
    "text",
    [
        *("typo = 1", "[call", "[prices]\nprefill = -1", "[users]\ncount = 0", "[users]\nsigma = nan"),
        *("[users]\nsigma = 1000", "[users]\nrequests_per_day = inf"),
    ],
)
def test_a_bad_scenario_names_its_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"s\.toml"):
        scenario(tmp_path, text)
    with pytest.raises(ValueError, match=r"none\.toml"):
        load(tmp_path / "none.toml")


def test_spread_and_margin_of_a_few_users() -> None:
    spread = Spread.of([1.0, 3.0, 2.0, 94.0])
    assert (spread.users, spread.mean, spread.p50, spread.most, spread.top_share) == (4, 25.0, 2.0, 94.0, 0.94)
    assert Margin.of([1.0, 3.0], 4.0) == Margin(4.0, 2.0, 0.5, 0.0)
    assert Spread.of([0.0]).top_share == 0.0


def test_every_kind_of_cap_bounds_a_month() -> None:
    prices = Prices.of(PricesConfig(prefill=1.0, decode=2.0))
    caps = (LimitConfig(period="hour", rolling=True, requests=10, tokens=1_000_000, money=3.0),)
    found = {c.name: c.cost for c in ceilings(caps, prices, dearest_call=0.002)}
    assert found == {
        "10 requests in any hour": pytest.approx(720 * 10 * 0.002),
        "1000000 tokens in any hour": pytest.approx(720 * 2.0),
        "3 USD in any hour": pytest.approx(720 * 3.0),
    }
    assert list(found.values()) == sorted(found.values())


async def test_the_ledgers_report_scales_to_a_month_and_prices_idle_time(tmp_path: Path) -> None:
    now = [360_000.0]
    ledger = Ledger(tmp_path / "l.db")
    hours = DeviceHours(ledger.execute, lambda: now[0])
    for i in range(10):
        user = "heavy" if i >= 2 else f"u{i}"
        row = Row(seq=i, time=360_000.0 + i * 86400 / 3, id="r", user=user, pool=Pool.BULK, finish="stop", status=200)
        row.cost, row.max_tokens, row.completion_tokens = 1_000_000_000, 100, 25
        row.finish = "length" if i == 0 else "stop"
        ledger.put(row)
    hours.step(step(run=90.0, prefill_tokens=0, decode_tokens=1000))
    hours.step(
        step(run=180.0, prefill_tokens=500, decode_tokens=1000)
    )  # 90 s of it for its decode tokens, as they take alone
    now[0] += 2 * 3600.0
    hours.write()
    await ledger.close()
    prices = Prices.of(PricesConfig(decode=1.0, device_hour=3.0, prefill_tokens_per_s=10.0))
    with reading(ledger.path) as database:
        stored = database.execute("SELECT hour, wall_s FROM device_hours ORDER BY hour").fetchall()
        report = of_ledger(database, Filter(), prices, device_hour=3.0, price_per_user=50.0)
        with pytest.raises(ValueError, match="no rows"):
            of_ledger(database, Filter(user="nobody"), prices)
    assert stored == [(100, 3600.0), (101, 3600.0), (102, 0.0)]
    assert sorted(report.costs) == pytest.approx([10.0, 10.0, 80.0])  # three days, so ten times
    assert report.lengths is not None
    assert (report.lengths.reserved, report.lengths.used, report.lengths.cut) == (1000, 250, 0.1)
    device = report.device
    assert device is not None
    assert (device.wall, device.busy, device.prefill, device.decode) == (7200.0, 270.0, 90.0, 180.0)
    prefill, decode = device.derived(3.0)
    assert prefill == pytest.approx(6.0 * 90 / 270 / 500 * 1e6)
    assert decode == pytest.approx(6.0 * 180 / 270 / 2000 * 1e6)
    text = "\n".join(report.lines())
    assert "25% was used" in text
    assert "it cost 6 USD, 96% of that while idle" in text


def test_a_device_that_did_nothing_has_no_price() -> None:
    assert Device(3600.0, 0.0, 0.0, 0, 0, 0.0, 0.0).derived(3.0) == (None, None)
    assert Device(0.0, 0.0, 0.0, 0, 0, 0.0, 0.0).busy_share == 0.0


@pytest.mark.parametrize("costs", [[1.0], [0.0, 0.0], [1e-9, 1e9], [float(i) for i in range(2000)]])
def test_the_plot_is_valid_svg_within_its_frame(costs: list[float]) -> None:
    svg = tail_plot(costs, {"<cap> & more": 5.0}, title="A < B", unit="USD")
    root = ET.fromstring(svg)
    assert root.tag.endswith("svg")
    (line,) = [e for e in root if e.tag.endswith("polyline")]
    points = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
    assert len(points) == min(400, len(costs))
    assert all(80 <= x <= 700 and 39 <= y <= 351 for x, y in points)
    assert "&lt;cap&gt; &amp; more" in svg


def test_the_plot_draws_price_and_cap(tmp_path: Path) -> None:
    svg = of_scenario(scenario(tmp_path)).plot()
    assert "price 10" in svg
    assert "cap: 0.5 USD per day" in svg
