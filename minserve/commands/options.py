"""Options that several commands share, and how a command ends when a setting is wrong."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import click

from minserve.settings import COMMAND_LINE, FIELDS, FLAG_SECTIONS, Settings, SettingsError, choices, flag_of, load

F = TypeVar("F", bound=Callable[..., Any])

_MODEL_SECTIONS = ("profile", "model.", "engine.")  # those of commands without a server
_FLAGS = {flag.removeprefix("--").replace("-", "_"): name for name in FIELDS if (flag := flag_of(name)) != COMMAND_LINE}


def settings_options(function: F) -> F:
    """What `config_options` adds, and a flag for each field of the usual sections."""
    return _flags(function, FLAG_SECTIONS)


def model_options(function: F) -> F:
    """The same without the sections of a server: for commands that run the model in the terminal."""
    return _flags(function, _MODEL_SECTIONS)


def _flags(function: F, sections: tuple[str, ...]) -> F:
    for flag, name in reversed(_FLAGS.items()):
        if not name.startswith(sections):
            continue
        field = FIELDS[name]
        default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
        metavar = "|".join(choices(field.type)) or "VALUE"
        function = click.option(
            "--" + flag.replace("_", "-"), flag, metavar=metavar, help=f"{name} [default: {default}]"
        )(function)
    return config_options(function)


def config_options(function: F) -> F:
    """--config FILE and --set section.field=value."""
    function = click.option("--set", "assignments", multiple=True, metavar="NAME=VALUE", help="Any other setting.")(
        function
    )
    return click.option("--config", "file", type=click.Path(path_type=Path), help="Default: ./minserve.toml")(function)


def read_settings(options: dict[str, Any], model: str | None = None) -> Settings:
    """Settings from the options that `settings_options` made; exits with the reason if one is wrong."""
    try:
        return reread_settings(options, model)
    except SettingsError as error:
        fail(str(error))


def reread_settings(options: dict[str, Any], model: str | None = None) -> Settings:
    """The same with the file and the environment as they are now. SettingsError if a value is wrong."""
    flags = {_FLAGS[key]: value for key, value in options.items() if key in _FLAGS and value is not None}
    if model is not None:
        flags["model.name"] = model
    for assignment in options.get("assignments", ()):
        name, equals, value = assignment.partition("=")
        if not equals:
            raise SettingsError(f"--set {assignment}: write it as NAME=VALUE")
        flags[name] = value
    return load(options.get("file"), os.environ, flags)


class Number(click.FloatRange):
    """The type of an option: a number within a range. FloatRange alone lets NaN pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is no number", param, ctx)
        return number


TEMPERATURE = Number(0, 2)  # as a request's field
SEED = click.IntRange(-(2**63), 2**63 - 1)  # as a request's field


class Output(click.Path):
    """The type of an option: a file to be written in the end, so it had better be possible."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        super().convert(value, param, ctx)
        path = Path(value)
        if not path.parent.is_dir():
            self.fail(f"there is no folder {str(path.parent)!r}", param, ctx)
        return path


def save(path: Path, text: str) -> None:
    """Write a file of `Output`'s; exits with status 1 and the reason if that fails all the same."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{path} can't be written: {error.strerror}", status=1)


def fail(message: str, status: int = 2) -> NoReturn:
    """Say what is wrong and leave, with status 2 if it is the command line."""
    click.echo(f"minserve: {message}", err=True)
    sys.exit(status)


def server_url(text: str) -> str:
    """The type of an option: where a server is, without a slash at the end."""
    try:
        parts = urlsplit(text)
        well = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        well = well and text.isprintable() and " " not in text
    except ValueError:  # of the port
        well = False
    if not well:
        raise click.BadParameter(f"{text!r} is no server; write it as http://127.0.0.1:8000")
    return text.rstrip("/")


def duration(text: str) -> float:
    """The type of an option: 30s, 10m, 1h30m, 7d, or a number of seconds."""
    if (seconds := duration_of(text)) is None:
        raise click.BadParameter(f"{text!r} is no duration; write it as 30s, 10m, 1h30m or 7d")
    return seconds


def moment(text: str) -> float:
    """The type of an option: a duration ago, or a date and time (ISO 8601; UTC unless it says). Unix seconds."""
    if (ago := duration_of(text)) is not None:
        return time.time() - ago
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no time; write it as 24h (ago), 2026-01-31 or 2026-01-31T12:00"
        ) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def duration_of(text: str) -> float | None:
    """Seconds, or None if the text is no duration."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if not re.fullmatch(r"(\d+(\.\d+)?[smhdw])+", text):
        return None
    return sum(float(n) * _SECONDS[unit] for n, _, unit in re.findall(r"(\d+(\.\d+)?)([smhdw])", text))


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
