"""New keys as text for minserve.toml.

Owns the spelling of an account in TOML. It must not know where the text goes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, get_args

import msgspec

from minserve.config import KeyConfig, LimitConfig, PeriodName, Section


def key_table(name: str, key: KeyConfig) -> str:
    """The key's table, as [keys.NAME]; fields that have their default are left out."""
    lines = [f"[keys.{_key(name)}]"]
    fields = sorted(_set_fields(key), key=lambda field: field[0] not in ("user", "sha256"))  # these first
    lines += [f"{field} = {_value(value)}" for field, value in fields]
    return "\n".join(lines) + "\n"


def parse_limit(text: str) -> LimitConfig:
    """ "day:tokens=200000,requests=500" as a cap. ValueError with what is wrong."""
    period, _, caps = text.partition(":")
    periods = get_args(PeriodName)
    if period not in periods:
        raise ValueError(f"{text!r}: the period is one of {', '.join(periods)}")
    fields: dict[str, Any] = {"period": period}
    for cap in caps.split(","):
        kind, _, amount = cap.partition("=")
        try:
            fields[kind] = float(amount) if kind == "money" else int(amount)
        except ValueError:
            raise ValueError(f"{text!r}: write it as PERIOD:KIND=AMOUNT, as day:tokens=200000") from None
    try:
        return msgspec.convert(fields, LimitConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"{text!r}: {error}") from None


def _set_fields(section: Section) -> list[tuple[str, Any]]:
    """Fields that differ from their default, or have none."""
    return [
        (field.name, value)
        for field in msgspec.structs.fields(section)
        if (value := getattr(section, field.name)) != field.default
    ]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Section):
        return "{" + ", ".join(f"{name} = {_value(each)}" for name, each in _set_fields(value)) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_value, value)) + "]"
    return repr(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _text(text: str) -> str:
    """JSON's escapes are TOML's, as long as characters beyond the first plane stay as they are."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
