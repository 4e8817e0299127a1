"""batch: a file of requests, answered by an engine of its own or by a server."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from minserve.commands.options import fail, read_settings, server_url, settings_options


@click.command()
@click.argument("source", metavar="IN.JSONL", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("target", metavar="OUT.JSONL", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--model", help="Which model. [default: as configured]")
@click.option("--concurrency", type=click.IntRange(min=1), help="Lines at once. [default: twice max-num-seqs]")
@click.option("--api-key", envvar="MINSERVE_API_KEY", help="Whose account pays, where keys are configured.")
@click.option(
    "--url",
    type=server_url,
    metavar="URL",
    help="A server that runs, as http://127.0.0.1:8000. [default: an engine of this process]",
)
@settings_options
def batch(
    source: Path,
    target: Path,
    model: str | None,
    concurrency: int | None,
    api_key: str | None,
    url: str | None,
    **options: Any,
) -> None:
    """Answer every line of IN.JSONL (OpenAI's batch format) into OUT.JSONL, in the bulk pool.

    Stop it with Ctrl-C or SIGTERM and run it again, here or elsewhere: lines that have a result are not run again.
    Exit status: 0 all answered, 1 some line has an error or the run could not go on, 2 unusable files, 3 stopped before
    the end.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from minserve.server.batch_file import Batch, run

    if url is not None and model is not None:
        fail("--url and --model exclude each other: a server has its model")
    settings = read_settings(options, model)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("lines", total=None)

        def progress(done: int, failed: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=f"lines, {failed} failed" if failed else "lines")

        def say(line: str) -> None:
            # Its reader may be gone, as a `tee` is after the same Ctrl-C: lines that run must not end for that.
            with suppress(OSError, SystemExit):  # Rich's for a broken pipe
                console.print(line, markup=False, highlight=False, soft_wrap=True)

        work = Batch(source, target, concurrency, api_key, url)
        status = run(settings.config, work, progress=progress, say=say)
    sys.exit(status)


COMMANDS = (batch,)
