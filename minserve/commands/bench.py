"""bench: load against any OpenAI-compatible server. Flag names are those of vLLM's `bench serve`."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from pathlib import Path
from typing import Any

import click

from minserve.commands.options import TEMPERATURE, Number, Output, fail, save, server_url


def goodput(text: str) -> tuple[str, float]:
    """The type of an option: a metric's name and its bound in milliseconds."""
    from minserve.bench.report import METRICS

    name, _, bound = text.partition(":")
    if name not in METRICS:
        raise click.BadParameter(f"{text!r}: the metric is one of {', '.join(METRICS)}")
    try:
        milliseconds = float(bound)
    except ValueError:
        milliseconds = math.nan
    if not milliseconds > 0:
        raise click.BadParameter(f"{text!r}: write it as METRIC:MILLISECONDS")
    return name, milliseconds


def percentiles(text: str) -> list[float]:
    """The type of an option: percents, separated by commas."""
    try:
        found = [float(percent) for percent in text.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(0 <= percent <= 100 for percent in found):
        raise click.BadParameter(f"{text!r}: write them as 50,90,99; each is between 0 and 100")
    return found


def json_object(text: str) -> dict[str, Any]:
    """The type of an option: a JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{text!r} is no JSON object")
    return found


def route(text: str) -> str:
    """The type of an option: the path of a URL."""
    if not text.startswith("/"):
        raise click.BadParameter(f"{text!r}: a path begins with a slash")
    return text


_NATURAL = click.IntRange(min=0)
_COUNT = click.IntRange(min=1)


@click.command()
@click.option("--base-url", type=server_url, metavar="URL", default="http://127.0.0.1:8000", show_default=True)
@click.option(
    "--endpoint",
    type=route,
    metavar="PATH",
    default="/v1/completions",
    show_default=True,
    help="or /v1/chat/completions",
)
@click.option("--model", help="Sent as `model`. [default: none]")
@click.option("--api-key", envvar="MINSERVE_API_KEY", help="Bearer token.")
@click.option("--num-prompts", type=_COUNT, default=32, show_default=True)
@click.option("--random-input-len", type=_NATURAL, default=256, show_default=True, help="Tokens of a prompt.")
@click.option("--random-output-len", type=_COUNT, default=64, show_default=True, help="Tokens of an answer.")
@click.option("--random-prefix-len", type=_NATURAL, default=0, show_default=True, help="Tokens that all prompts share.")
@click.option(
    "--request-rate",
    type=Number(0, min_open=True),
    default=math.inf,
    show_default=True,
    help="Requests a second (open loop).",
)
@click.option(
    "--burstiness",
    type=Number(0, math.inf, min_open=True, max_open=True),
    default=1.0,
    show_default=True,
    help="1 = Poisson arrivals.",
)
@click.option("--max-concurrency", type=_COUNT, help="Clients of a closed loop. [default: no limit]")
@click.option("--num-warmups", type=_NATURAL, default=1, show_default=True)
@click.option("--temperature", type=TEMPERATURE, default=0.0, show_default=True)
@click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True)
@click.option("--metric-percentiles", type=percentiles, default="50,90,99", show_default=True)
@click.option("--goodput", type=goodput, multiple=True, metavar="METRIC:MS", help="As ttft:1000; repeatable.")
@click.option("--extra-body", type=json_object, metavar="JSON", default="{}", help="Merged into every body.")
@click.option("--tokenizer", type=click.Path(exists=True), help="A .gguf or model folder: cut prompts exactly.")
@click.option("--seed", default=0, show_default=True)
@click.option("--save-result", "result", type=Output(), metavar="FILE", help="Write the summary as JSON.")
@click.option("--disable-tqdm", is_flag=True, help="No progress bar.")
def bench(**options: Any) -> None:
    """Measure a server: TTFT, TPOT, ITL and end-to-end latency at p50/p90/p99, throughput, goodput."""
    from rich.console import Console

    from minserve.bench.report import table

    summary = asyncio.run(_run(options, Console(stderr=True)))
    console = Console()
    if summary["completed"]:
        console.print(table(summary))
    for key in ("requests", "completed", "duration_s", "request_throughput", "output_throughput", "goodput"):
        if key in summary:
            console.print(f"{key}: {summary[key]}", highlight=False)
    if summary["client_lag_p99_ms"] is not None:
        console.print(f"client lag p99: {summary['client_lag_p99_ms']} ms", highlight=False, style="dim")
    for reason, count in summary["errors"].items():
        console.print(f"{count} x {reason}", style="red", markup=False, soft_wrap=True)
    if options["result"]:
        save(options["result"], json.dumps(summary, indent=2) + "\n")
    sys.exit(0 if summary["completed"] else 1)


async def _run(options: dict[str, Any], console: Any) -> dict[str, Any]:
    from rich.progress import Progress

    from minserve.bench.run import Plan, run
    from minserve.bench.workload import cut_by_characters, prompts

    cut = exact_cut(options["tokenizer"]) if options["tokenizer"] else cut_by_characters
    texts = prompts(
        options["num_prompts"],
        options["random_input_len"] + options["random_prefix_len"],
        shared_tokens=options["random_prefix_len"],
        seed=options["seed"],
        cut=cut,
    )
    plan = Plan(
        request_rate=options["request_rate"],
        burstiness=options["burstiness"],
        max_concurrency=options["max_concurrency"],
        warmups=options["num_warmups"],
        seed=options["seed"],
    )
    with Progress(console=console, transient=True, disable=options["disable_tqdm"] or not console.is_terminal) as bar:
        task = bar.add_task("requests", total=len(texts))
        summary, _ = await run(
            _target(options),
            texts,
            plan,
            percentiles=options["metric_percentiles"],
            slo=dict(options["goodput"]),
            progress=lambda done: bar.update(task, completed=done),
        )
    return summary


def _target(options: dict[str, Any]) -> Any:
    from minserve.bench.client import Target

    body = {
        "max_tokens": options["random_output_len"],
        "temperature": options["temperature"],
        "ignore_eos": options["ignore_eos"],
        **({"model": options["model"]} if options["model"] else {}),
        **options["extra_body"],
    }
    headers = {"authorization": f"Bearer {options['api_key']}"} if options["api_key"] else {}
    return Target(options["base_url"] + options["endpoint"], "chat" in options["endpoint"], body, headers)


def exact_cut(path: str) -> Any:
    """Cut texts to a number of tokens of the model at `path`; exits with the reason if there is none."""
    from minserve.text.tokenizer import Tokenizer
    from minserve.weights.checkpoint import load_checkpoint

    try:
        tokenizer = Tokenizer.from_source(load_checkpoint(Path(path)).tokenizer)
    except (OSError, ValueError) as error:
        fail(f"--tokenizer: {error}")

    def cut(text: str, tokens: int) -> str:
        return tokenizer.decode(tokenizer.encode(text)[:tokens])

    return cut


COMMANDS = (bench,)
