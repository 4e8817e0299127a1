"""doctor: the three numbers of a running server, and what they point at."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import click

from minserve.commands.remote import ask, server_options
from minserve.observe.doctor import time_text


@click.command()
@click.option("--json", "raw", is_flag=True, help="The whole status instead.")
@server_options
def doctor(url: str | None, api_key: str | None, raw: bool, **options: Any) -> None:
    """Ask a running server how it is: TTFT, inter-token time, utilization. Exit status 1 if there is a problem."""
    status = ask("/status", "findings", url, api_key, options)
    click.echo(json.dumps(status, indent=2) if raw else "\n".join(_lines(status)))
    sys.exit(any(finding["weight"] == "problem" for finding in status["findings"]))


def _lines(status: dict[str, Any]) -> Iterator[str]:
    numbers, pools = status["numbers"], status["numbers"]["pools"]
    yield f"{status['model']}, minserve {status['version']}, {status['state']}; the last {numbers['window']:.0f} s:"
    yield ""
    yield f"{'':22}" + "".join(f"{pool:>14}" for pool in pools)
    for name, field in (("first token, p99", "ttft_p99"), ("between tokens, p99", "itl_p99")):
        times = ("-" if pool[field] is None else time_text(pool[field]) for pool in pools.values())
        yield f"{name:22}" + "".join(f"{time:>14}" for time in times)
    yield f"{'running, waiting':22}" + "".join(
        f"{status['running'].get(pool, 0):>8}, {status['waiting'].get(pool, 0):>4}" for pool in pools
    )
    yield (
        f"{'utilization':22}{numbers['utilization']:14.0%}  of the device's peak; busy {numbers['busy']:.0%} of the "
        f"time, {numbers['running']:.1f} requests a step"
    )
    yield ""
    for finding in status["findings"]:
        yield f"{finding['weight']:8}{finding['text']}"


COMMANDS = (doctor,)
