"""Where the configuration comes from: defaults < profile < minserve.toml < MINSERVE_* < command-line flags.

Owns nothing; `load` returns a Config and the origin of every value. Each bad value is an error that names the field and
the place it came from; an unknown key is answered with the nearest known one.

Environment: MINSERVE_<SECTION>_<FIELD>, as MINSERVE_ENGINE_MAX_NUM_SEQS. Lists are separated by commas.
"""

from __future__ import annotations

import difflib
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from minserve.config import Config, Section
from minserve.profiles import PROFILES

PREFIX = "MINSERVE_"
# Read elsewhere: they move folders or name a file, so they can't stand in the file itself.
OTHER_VARIABLES = frozenset({"MINSERVE_CACHE", "MINSERVE_DATA", "MINSERVE_CONFIG", "MINSERVE_API_KEY"})
# Sections whose fields are flags of their own; the rest is reached through --set.
FLAG_SECTIONS = ("profile", "model.", "engine.", "limits.", "server.")
COMMAND_LINE = "the command line"

# What nobody chose gives way to a ceiling that somebody did: `--max-tokens 77` needs no second flag.
BELOW = {
    "limits.default_max_tokens": "limits.max_tokens",
    "limits.default_completion_tokens": "limits.max_tokens",
    "pools.interactive.max_num_seqs": "engine.max_num_seqs",
    "pools.bulk.max_num_seqs": "engine.max_num_seqs",
}


class SettingsError(ValueError):
    """A value that can't be used. The message names the field and where it was set."""


@dataclass(frozen=True, slots=True)
class Field:
    """One configurable value: its dotted name, its type and its default."""

    name: str
    type: Any
    default: Any


def fields(section: type[Section] = Config, prefix: str = "") -> Iterator[Field]:
    """Every leaf of the configuration; `keys` (a table of tables) counts as one."""
    for f in msgspec.structs.fields(section):
        if isinstance(f.type, type) and issubclass(f.type, Section):
            yield from fields(f.type, f"{prefix}{f.name}.")
        else:
            default = f.default if f.default is not msgspec.NODEFAULT else f.default_factory()
            yield Field(prefix + f.name, f.type, default)


FIELDS: dict[str, Field] = {f.name: f for f in fields()}


@dataclass(frozen=True, slots=True)
class Settings:
    config: Config
    origins: Mapping[str, str]  # dotted name -> "default", "profile ...", "minserve.toml", "MINSERVE_...", "--flag"


def load(file: Path | None, environment: Mapping[str, str], flags: Mapping[str, str]) -> Settings:
    """flags: dotted name -> text. A named file must exist; without one ./minserve.toml is read if it is there."""
    named = file or (Path(environment["MINSERVE_CONFIG"]) if "MINSERVE_CONFIG" in environment else None)
    path = named or Path("minserve.toml")
    values: dict[str, Any] = {}
    origins = dict.fromkeys(FIELDS, "default")
    if named is not None or path.exists():
        for name, value in _flatten(_read(path), str(path)):
            values[name] = _convert(name, value, str(path), strict=True)
            origins[name] = str(path)
    for variable, text in sorted(environment.items()):
        if variable.startswith(PREFIX) and variable not in OTHER_VARIABLES:
            name = _of_variable(variable)
            values[name] = _convert(name, text, variable, strict=False)
            origins[name] = variable
    for name, text in flags.items():
        _known(name, FIELDS, COMMAND_LINE)
        flag = flag_of(name)
        values[name] = _convert(name, text, flag, strict=False)
        origins[name] = flag
    _fill_in(values, origins)
    return Settings(_build(values), origins)


def _fill_in(values: dict[str, Any], origins: dict[str, str]) -> None:
    """What nobody chose: the profile's values, and what follows from a ceiling that somebody chose."""
    chosen = set(values)
    profile = values.get("profile", Config().profile)
    for name, value in PROFILES[profile].items():
        if name not in chosen:
            values[name] = value
            origins[name] = f"profile {profile}"
    for name, ceiling in BELOW.items():
        if name not in chosen and ceiling in chosen and values[ceiling] < values.get(name, FIELDS[name].default):
            values[name] = values[ceiling]
            origins[name] = origins[ceiling]


def data_dir() -> Path:
    """MINSERVE_DATA, or this platform's folder for a user's application data; made if it is missing.

    SettingsError if it can't be.
    """
    if moved := os.environ.get("MINSERVE_DATA"):
        folder = Path(moved).expanduser().absolute()
    elif sys.platform == "win32":
        folder = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "minserve"
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Application Support" / "minserve"
    else:
        folder = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "minserve"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"the data folder {folder} can't be made: {error.strerror}. MINSERVE_DATA names another one"
        ) from None
    return folder


def flag_of(name: str) -> str:
    """The command-line spelling of a dotted name; where it came from if it has no flag of its own."""
    if name == "model.name" or not name.startswith(FLAG_SECTIONS):
        return COMMAND_LINE
    return "--" + name.rpartition(".")[2].replace("_", "-")


def choices(kind: Any) -> tuple[str, ...]:
    """The words that a field of this type is one of; empty for every other type."""
    return get_args(kind) if get_origin(kind) is Literal else ()


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise SettingsError(f"{path} is a folder; the configuration is a file")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from None


def _flatten(table: Mapping[str, Any], path: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    sections = {name.rpartition(".")[0] for name in FIELDS} | {"pools"}
    for key, value in table.items():
        name = prefix + key
        if name in FIELDS:
            yield name, value
        elif isinstance(value, dict) and name in sections:
            yield from _flatten(value, path, name + ".")
        else:
            _known(name, {*FIELDS, *sections - {""}}, path)


def _known(name: str, known: Mapping[str, Any] | set[str], where: str) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise SettingsError(f"{where}: unknown setting {name!r}.{hint}")


def _of_variable(variable: str) -> str:
    names = {PREFIX + name.upper().replace(".", "_"): name for name in FIELDS}
    if variable not in names:
        near = difflib.get_close_matches(variable, list(names), n=1, cutoff=0.6)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise SettingsError(f"environment: unknown variable {variable}.{hint}")
    return names[variable]


def _convert(name: str, value: Any, where: str, *, strict: bool) -> Any:
    field = FIELDS[name]
    if not strict and isinstance(value, str) and isinstance(field.default, tuple):
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        return msgspec.convert(value, field.type, strict=strict)
    except msgspec.ValidationError as error:
        if words := choices(field.type):
            raise SettingsError(f"{where}: {name} is one of {', '.join(words)} (got {str(value)[:60]!r})") from None
        shown = "" if name == "keys" else f" (got {str(value)[:60]!r})"
        raise SettingsError(f"{where}: {name}: {error}{shown}") from None


def _build(values: Mapping[str, Any]) -> Config:
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *parents, leaf = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    built: Config = _replace(Config(), tree)
    return built


def _replace(section: Any, tree: Mapping[str, Any]) -> Any:
    """`section` with the tree's values in the place of its own; nested tables go into nested sections."""
    changes = {}
    for name, value in tree.items():
        current = getattr(section, name)
        changes[name] = _replace(current, value) if isinstance(current, Section) else value
    return msgspec.structs.replace(section, **changes)
