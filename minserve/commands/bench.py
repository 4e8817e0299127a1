"""bench: load against any OpenAI-compatible server. Flag names are those of vLLM's `bench serve`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import click

from minserve.commands.options import fail


def parse_goodput(items: tuple[str, ...]) -> dict[str, float]:
    """["ttft:1000", "itl:100"] -> milliseconds by metric."""
    slo: dict[str, float] = {}
    for item in items:
        name, _, bound = item.partition(":")
        try:
            slo[name] = float(bound)
        except ValueError:
            fail(f"--goodput {item}: write it as METRIC:MILLISECONDS")
        if name not in ("ttft", "tpot", "itl", "e2el"):
            fail(f"--goodput {item}: the metric is one of ttft, tpot, itl, e2el")
    return slo


@click.command()
@click.option("--base-url", default="http://127.0.0.1:8000", show_default=True)
@click.option("--endpoint", default="/v1/completions", show_default=True, help="or /v1/chat/completions")
@click.option("--model", help="Sent as `model`. [default: none, or what /v1/models lists]")
@click.option("--api-key", envvar="MINSERVE_API_KEY", help="Bearer token.")
@click.option("--num-prompts", default=32, show_default=True)
@click.option("--random-input-len", default=256, show_default=True, help="Tokens of a prompt.")
@click.option("--random-output-len", default=64, show_default=True, help="Tokens of an answer.")
@click.option("--random-prefix-len", default=0, show_default=True, help="Tokens that all prompts share.")
@click.option("--request-rate", default=float("inf"), show_default=True, help="Requests a second (open loop).")
@click.option("--burstiness", default=1.0, show_default=True, help="1 = Poisson arrivals.")
@click.option("--max-concurrency", type=int, help="Clients of a closed loop. [default: no limit]")
@click.option("--num-warmups", default=1, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True)
@click.option("--metric-percentiles", default="50,90,99", show_default=True)
@click.option("--goodput", multiple=True, metavar="METRIC:MS", help="As ttft:1000; repeatable.")
@click.option("--extra-body", default="{}", help="JSON merged into every body.")
@click.option("--tokenizer", type=click.Path(exists=True), help="A .gguf or model folder: cut prompts exactly.")
@click.option("--seed", default=0, show_default=True)
@click.option("--save-result", "result", type=click.Path(path_type=Path), help="Write the summary as JSON.")
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
        console.print(f"{count} x {reason}", style="red", markup=False)
    if options["result"]:
        options["result"].write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if summary["completed"] else 1)


async def _run(options: dict[str, Any], console: Any) -> dict[str, Any]:
    from rich.progress import Progress

    from minserve.bench.client import Target
    from minserve.bench.run import Plan, run
    from minserve.bench.workload import cut_by_characters, prompts

    body = {
        "max_tokens": options["random_output_len"],
        "temperature": options["temperature"],
        "ignore_eos": options["ignore_eos"],
        **({"model": options["model"]} if options["model"] else {}),
        **json.loads(options["extra_body"]),
    }
    headers = {"authorization": f"Bearer {options['api_key']}"} if options["api_key"] else {}
    url = options["base_url"].rstrip("/") + options["endpoint"]
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
    with Progress(console=console, transient=True, disable=options["disable_tqdm"]) as bar:
        task = bar.add_task("requests", total=len(texts))
        summary, _ = await run(
            Target(url, "chat" in options["endpoint"], body, headers),
            texts,
            plan,
            percentiles=[float(q) for q in options["metric_percentiles"].split(",")],
            slo=parse_goodput(options["goodput"]),
            progress=lambda done: bar.update(task, completed=done),
        )
    return summary


def exact_cut(path: str) -> Any:
    """Cut texts to a number of tokens of the model at `path`."""
    from minserve.text.tokenizer import Tokenizer
    from minserve.weights.checkpoint import load_checkpoint

    tokenizer = Tokenizer.from_source(load_checkpoint(Path(path)).tokenizer)

    def cut(text: str, tokens: int) -> str:
        return tokenizer.decode(tokenizer.encode(text)[:tokens])

    return cut


COMMANDS = (bench,)
