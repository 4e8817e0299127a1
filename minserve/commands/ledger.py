"""ledger, cost: what was used, by whom, and what it costs."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from minserve.commands.options import F, Number, Output, config_options, fail, moment, read_settings, save
from minserve.config import Config
from minserve.settings import data_dir

_EQUAL = ("key", "user", "end-user", "feature", "run", "pool", "finish")


def filter_options(function: F) -> F:
    """Which rows."""
    function = click.option("--status", type=click.IntRange(100, 599), help="HTTP status.")(function)
    for name in reversed(_EQUAL):
        function = click.option(f"--{name}", help=f"Only this {name.replace('-', ' ')}.")(function)
    function = click.option("--until", type=moment, help="As --since.")(function)
    return click.option("--since", type=moment, help="24h (ago), 2026-01-31 or 2026-01-31T12:00.")(function)


@click.command()
@click.argument("what", type=click.Choice(["rows", "summary"]), default="rows")
@click.option("--by", help="Of a summary: columns, or day; separated by commas. [default: user]")
@click.option("--format", "form", type=click.Choice(["table", "csv", "jsonl"]), default="table", show_default=True)
@click.option("--limit", type=click.IntRange(0, 2**63 - 1), default=50, show_default=True, help="Latest rows; 0 = all.")
@filter_options
@config_options
def ledger(what: str, by: str | None, form: Any, limit: int, **options: Any) -> None:
    """Show the ledger's ROWS, or a SUMMARY of calls, tokens and cost. A server may run meanwhile.

    Tables show money in the currency, CSV and JSON lines in billionths of it.
    """
    from minserve.economics.queries import reading, rows, summary, text
    from minserve.economics.schema import LedgerError

    if what == "rows" and by is not None:
        fail("--by groups a summary; write `minserve ledger summary --by ...`")
    config = read_settings(options).config
    try:
        path = _path(config)
        with reading(path) as database:
            chosen = _filter(options)
            if what == "rows":
                found = rows(database, chosen, limit or None)
            else:
                found = summary(database, chosen, [name.strip() for name in (by or "user").split(",") if name.strip()])
    except (LedgerError, ValueError) as error:
        fail(str(error))
    click.echo(text(found, form), nl=False)
    if form == "table":
        kept = f"{config.ledger.retention_days} days" if config.ledger.retention_days else "for ever"
        click.echo(f"{path}: rows are kept {kept} (ledger.retention_days)", err=True)


@click.command()
@click.argument("scenario", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--price", type=Number(0, math.inf, max_open=True), help="What a user pays a month: shows the margin.")
@click.option("--plot", type=Output(), metavar="FILE", help="Write the tail to this .svg file.")
@filter_options
@config_options
def cost(scenario: Path | None, price: float | None, plot: Path | None, **options: Any) -> None:
    """What a user costs in a month, and the dearest ones: from the ledger, or of a SCENARIO file."""
    from minserve.economics import report
    from minserve.economics.device import priced
    from minserve.economics.queries import reading
    from minserve.economics.scenario import load
    from minserve.economics.schema import LedgerError

    if plot is not None and plot.suffix.lower() != ".svg":
        fail(f"--plot: {plot.name}: the plot is an SVG file, so its name ends in .svg")
    try:
        if scenario is not None:
            planned = load(scenario)
            if price is not None:
                planned = msgspec.structs.replace(planned, price_per_user=price)
            found = report.of_scenario(planned, scenario.stem)
        else:
            config = read_settings(options).config
            with reading(_path(config)) as database:
                prices = priced(config.prices, database, time.time())
                account, bounds = report.loosest(config, prices, options["key"])
                found = report.of_ledger(
                    database,
                    _filter(options),
                    prices,
                    device_hour=config.prices.device_hour,
                    account=account,
                    bounds=bounds,
                    price_per_user=price,
                )
    except (LedgerError, ValueError) as error:
        fail(str(error))
    for line in found.lines():
        click.echo(line)
    if plot is not None:
        save(plot, found.plot())


def _path(config: Config) -> Path:
    from minserve.economics.ledger import ledger_path

    return ledger_path(config.ledger, data_dir())


def _filter(options: dict[str, Any]) -> Any:
    from minserve.economics.queries import Filter

    return Filter(**{name: options[name] for name in Filter.__slots__})


COMMANDS = (ledger, cost)
