"""The command line. Commands live in minserve/commands/, thin and without logic; what they call does the work."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

import click

import minserve
from minserve.commands import batch, bench, doctor, keys, ledger, models, run, warmup


class Commands(click.Group):
    """What every command may rely on: standard streams that are open and take any text; a full disk is one line."""

    def main(self, *args: Any, **extra: Any) -> Any:
        _prepare_streams()
        try:
            return super().main(*args, **extra)
        except OSError as error:
            with contextlib.suppress(OSError):
                click.echo(f"minserve: {error}", err=True)
            sys.exit(1)


def _prepare_streams() -> None:
    """A closed stream is the null device from here on: no file that is opened later gets its number, and is written to.

    What an encoding lacks is escaped on standard output too, as Python does on standard error.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(minserve.__version__, prog_name="minserve")
def main() -> None:
    """Serve a language model from this machine: OpenAI-compatible, streaming, with ceilings that hold."""


for _module in (run, batch, models, warmup, keys, ledger, doctor, bench):
    for _command in _module.COMMANDS:
        main.add_command(_command)
