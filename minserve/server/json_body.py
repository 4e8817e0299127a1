"""From the bytes of a request body to a checked struct.

Owns what JSON is accepted: UTF-8 with or without a byte order mark, one object, no NaN or Infinity, no lone surrogates,
bounded depth, no field twice. A field that is null counts as absent. It must not know what any field means; `schema.py`
says that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec

from minserve.request import RequestError
from minserve.server.errors import shown
from minserve.settings import choices

T = TypeVar("T", bound=msgspec.Struct)

_BOM = b"\xef\xbb\xbf"
_MAX_INT_DIGITS = 4300
_MANY_FIELDS = 64
_MOST_SHOWN = 200
_WHERE = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)


def parse_object(body: bytes) -> dict[str, Any]:
    """The body's fields without those that are null. RequestError 400 names the field at fault where one is known."""
    body = body.removeprefix(_BOM)
    if not body.strip():
        raise _invalid("The request body is empty; send a JSON object.")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _invalid("The request body is nested too deeply.") from None
    except msgspec.DecodeError as error:
        raise _explain(body, str(error)) from None
    if not isinstance(value, dict):
        raise _invalid("The request body must be a JSON object.")
    if _may_repeat(body, value):
        _refuse_duplicates(body)
    return {name: field for name, field in value.items() if field is not None}


def _may_repeat(body: bytes, value: dict[str, Any]) -> bool:
    """A name stands in the body twice, or may be written in two ways. Each name costs a search: so only for a few."""
    return len(value) > _MANY_FIELDS or b"\\u" in body or any(body.count(b'"%b"' % name.encode()) > 1 for name in value)


def _refuse_duplicates(body: bytes) -> None:
    """The slow way. JSON parsers differ in which of two equal names counts: what was checked might not be done."""
    try:
        pairs = json.loads(body, object_pairs_hook=list, parse_int=str, parse_float=str)
    except RecursionError:
        raise _invalid("The request body is nested too deeply.") from None
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise _invalid(f"The request body has the field {shown(name)} twice.", _short(name))
        seen.add(name)


def to_struct(fields: dict[str, Any], struct: type[T]) -> T:
    """Fields as `struct`. Unknown ones are ignored; strings and booleans are no numbers, but 10.0 is an integer."""
    try:
        return msgspec.convert(_integral(fields, struct), struct)
    except msgspec.ValidationError as error:
        match = _WHERE.fullmatch(str(error))
        what, path = (match["what"], match["path"]) if match else (str(error), None)
        what, path = _short(what), path and _short(path)
        name = path or _missing(what)
        if path and (words := _words(struct, path)):
            what = f"must be one of {', '.join(words)}"
        raise RequestError(f"{name}: {what}." if path else f"{what}.", code="invalid_type", param=name) from None
    except RecursionError:
        raise _invalid("The request body is nested too deeply.") from None


def _integral(fields: dict[str, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Top-level integer fields that came as 10.0 become 10: JSON has one kind of number."""
    floats = {name: value for name, value in fields.items() if isinstance(value, float) and value.is_integer()}
    return fields | {name: int(value) for name, value in floats.items() if name in _integer_fields(struct)}


@cache
def _integer_fields(struct: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.name for field in msgspec.structs.fields(struct) if field.type in (int, int | None))


@cache
def _words(struct: type[msgspec.Struct], name: str) -> tuple[str, ...]:
    """What a top-level field may be, if it is one of a few words."""
    kinds = {field.name: (field.type, *get_args(field.type)) for field in msgspec.structs.fields(struct)}
    return next(filter(None, map(choices, kinds.get(name, ()))), ())


def _missing(what: str) -> str | None:
    match = re.fullmatch(r"Object missing required field `(\w+)`", what)
    return match[1] if match else None


def _short(text: str) -> str:
    """What a caller wrote, or a library of it, as it may stand in an answer: a body of megabytes is not sent back."""
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


class _Refused:
    """Stands for a value that JSON lets through and we don't, while looking for the field it is in."""

    def __init__(self, why: str) -> None:
        self.why = why


def _explain(body: bytes, reason: str) -> RequestError:
    """Why msgspec refused the body, and in which field: the slow way, on bodies that are refused anyway."""
    try:
        fields = json.loads(body, parse_constant=_constant, parse_float=_float, parse_int=_int)
    except UnicodeDecodeError:
        return _invalid("The request body is not valid UTF-8.")
    except (ValueError, RecursionError):
        return _invalid(f"The request body is not valid JSON: {reason}.")
    for name, field in fields.items() if isinstance(fields, dict) else ():
        for value in _walk(field):
            if isinstance(value, _Refused):
                return _invalid(f"{_short(name)}: {value.why}.", _short(name))
            if isinstance(value, str) and not _is_unicode(value):
                return _invalid(f"{_short(name)}: the text holds half of a surrogate pair.", _short(name))
    return _invalid(f"The request body is not valid JSON: {reason}.")


def _constant(name: str) -> _Refused:
    return _Refused(f"{name} is not a JSON number")


def _float(text: str) -> float | _Refused:
    value = float(text)
    return value if abs(value) < float("inf") else _Refused("the number is out of range")


def _int(text: str) -> int | _Refused:
    return int(text) if len(text) <= _MAX_INT_DIGITS else _Refused("the number is out of range")


def _walk(value: Any) -> Iterator[Any]:
    """Every value below, keys too; a stack instead of recursion, since the input decides the depth."""
    stack = [value]
    while stack:
        item = stack.pop()
        yield item
        if isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _invalid(message: str, param: str | None = None) -> RequestError:
    return RequestError(message, code="invalid_json", param=param)
