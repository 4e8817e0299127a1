"""models, cache, completion: what there is to run, and what lies in the cache."""

from __future__ import annotations

import click

from minserve.commands.options import fail


@click.command()
def models() -> None:
    """List the models known by name: licence, what is to be fetched, how much of the disk it takes."""
    from rich.console import Console
    from rich.table import Table

    from minserve.weights.hub import cached, list_models

    table = Table(box=None, pad_edge=False)
    for column in ("name", "licence", "download", "on disk", "about"):
        table.add_column(column)
    here = {model.name: model.size for model in cached()}
    for known in list_models():
        table.add_row(known.name, known.licence, _size(known.download), _size(here.pop(known.name, 0)), known.about)
    for name, size in here.items():
        table.add_row(name, "its own", "-", _size(size), "fetched")
    Console().print(table)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.0f} MB" if nbytes else "-"


@click.group()
def cache() -> None:
    """What was fetched: list it, clear it. MINSERVE_CACHE moves the folder."""


@cache.command(name="list")
def list_cache() -> None:
    """List cached models and what they take on the disk."""
    from minserve.weights.cache import cache_dir
    from minserve.weights.hub import cached

    click.echo(f"{cache_dir()}, sizes on disk:")
    for model in cached():
        click.echo(f"{model.size / 1e6:8.1f} MB  {model.name}  {model.path}")


@cache.command()
@click.argument("name", required=False)
@click.option("--all", "everything", is_flag=True, help="Every cached model.")
def clear(name: str | None, everything: bool) -> None:
    """Remove the cached model NAME (or --all)."""
    from minserve.weights.cache import DownloadError
    from minserve.weights.hub import cached
    from minserve.weights.hub import clear as remove

    if (name is None) == (not everything):
        fail("name one cached model, or say --all")
    names = [model.name for model in cached()] if name is None else [name]
    try:
        freed = sum(remove(each) for each in names)
    except DownloadError as error:
        fail(str(error))
    click.echo(f"{freed / 1e6:.1f} MB freed")


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes commands and flags: eval "$(minserve completion bash)"."""
    from click.shell_completion import get_completion_class

    from minserve.cli import main

    script = get_completion_class(shell)
    if script is None:
        fail(f"no completion for {shell}")
    click.echo(script(main, {}, "minserve", "_MINSERVE_COMPLETE").source())


COMMANDS = (models, cache, completion)
