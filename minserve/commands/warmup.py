"""warmup: everything that makes a first start slow, done ahead of it."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from minserve.commands.options import read_settings, settings_options


@click.command()
@click.argument("model", required=False)
@settings_options
def warmup(model: str | None, **options: Any) -> None:
    """Fetch MODEL, compile its kernels, generate two tokens, exit: the next start finds everything in its caches."""
    from rich.console import Console

    from minserve.terminal import Style, load, stream

    config = read_settings(options, model).config
    started = time.monotonic()
    assembly = load(config, Console(stderr=True))
    if assembly is None:
        sys.exit(1)
    loaded = time.monotonic()
    prompt = assembly.tokenizer.encode("Hello", bos=True)
    errors = [delta.error for delta, _ in stream(assembly, prompt, Style(None, 0.0, 2, None)) if delta.error]
    assembly.engine.runner.close()
    for error in errors:
        click.echo(f"minserve: {error.message}", err=True)
    steps = time.monotonic() - loaded
    click.echo(f"{assembly.name} on {assembly.backend.description}")
    click.echo(f"loaded in {loaded - started:.1f} s, first steps in {steps:.1f} s")
    sys.exit(bool(errors))


COMMANDS = (warmup,)
