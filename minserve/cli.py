"""The command line. Commands live in minserve/commands/, thin and without logic; what they call does the work."""

from __future__ import annotations

import click

import minserve
from minserve.commands import batch, bench, doctor, keys, ledger, models, run, warmup


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(minserve.__version__, prog_name="minserve")
def main() -> None:
    """Serve a language model from this machine: OpenAI-compatible, streaming, with ceilings that hold."""


for _module in (run, batch, models, warmup, keys, ledger, doctor, bench):
    for _command in _module.COMMANDS:
        main.add_command(_command)
