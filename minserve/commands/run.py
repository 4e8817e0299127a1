"""serve, generate, chat, pull, config: run a model. Each imports what it needs when it runs."""

from __future__ import annotations

import sys
from typing import Any

import click

from minserve.commands.options import SEED, TEMPERATURE, model_options, read_settings, reread_settings, settings_options
from minserve.settings import FIELDS


@click.command()
@click.argument("model", required=False)
@settings_options
def serve(model: str | None, **options: Any) -> None:
    """Serve MODEL: a known name, a Hugging Face repo id, a folder, or a .gguf file."""
    settings = read_settings(options, model)
    from minserve.server.serve import run
    from minserve.terminal import fetch

    sys.exit(run(settings.config, lambda: reread_settings(options, model).config, fetch))


@click.command()
@click.argument("prompt")
@click.option("--model", help="Which model. [default: as configured]")
@click.option("--max-new", type=click.IntRange(min=1), default=256, show_default=True, help="The most tokens to write.")
@click.option("--temperature", type=TEMPERATURE, default=0.0, show_default=True)
@click.option("--seed", type=SEED)
@click.option("--system", help="A system prompt.")
@click.option("--raw", is_flag=True, help="Continue the text instead of answering it (no chat template).")
@model_options
def generate(prompt: str, model: str | None, **options: Any) -> None:
    """Write an answer to PROMPT and exit; no server needed. PROMPT - reads standard input."""
    from minserve.terminal import Style, generate_once, read_input

    text = read_input() if prompt == "-" else prompt
    style = Style(options["system"], options["temperature"], options["max_new"], options["seed"])
    sys.exit(generate_once(read_settings(options, model).config, text, style, raw=options["raw"]))


@click.command()
@click.option("--model", help="Which model. [default: as configured]")
@click.option(
    "--max-new", type=click.IntRange(min=1), default=512, show_default=True, help="The most tokens of an answer."
)
@click.option("--temperature", type=TEMPERATURE, default=0.7, show_default=True)
@click.option("--seed", type=SEED)
@click.option("--system", help="A system prompt.")
@model_options
def chat(model: str | None, **options: Any) -> None:
    """Chat in the terminal; no server needed."""
    from minserve.terminal import Style, chat_loop

    style = Style(options["system"], options["temperature"], options["max_new"], options["seed"])
    sys.exit(chat_loop(read_settings(options, model).config, style))


@click.command()
@click.argument("model", required=False)
@model_options
def pull(model: str | None, **options: Any) -> None:
    """Fetch MODEL into the cache and say where it is."""
    config = read_settings(options, model).config
    from minserve.terminal import fetch
    from minserve.weights.cache import DownloadError

    try:
        click.echo(fetch(config))
    except (DownloadError, OSError) as error:
        click.echo(f"minserve: {error}", err=True)
        sys.exit(1)


@click.command(name="config")
@click.argument("model", required=False)
@settings_options
def show_config(model: str | None, **options: Any) -> None:
    """Print the effective configuration and where each value came from. Exit status 2 if a server would refuse it."""
    from minserve.config_rules import doubtful, validate

    settings = read_settings(options, model)
    width = max(map(len, FIELDS))
    for name in FIELDS:
        value: Any = settings.config
        for part in name.split("."):
            value = getattr(value, part)
        shown = ", ".join(value) or "none" if name == "keys" else repr(value)
        click.echo(f"{name:{width}}  {shown:24}  {settings.origins[name]}")
    broken = validate(settings.config)
    for line in (*broken, *doubtful(settings.config)):
        click.echo(f"minserve: {line}", err=True)
    sys.exit(2 if broken else 0)


COMMANDS = (serve, generate, chat, pull, show_config)
