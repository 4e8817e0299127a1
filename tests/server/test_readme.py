"""The page about requests names whatever is accepted, with the defaults that the code has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from minserve.server import app, origins, schema, wire

PAGE = Path(schema.__file__).with_name("README.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([^`\s]+)`", PAGE))
BODIES = [each for each in vars(schema).values() if isinstance(each, type) and issubclass(each, msgspec.Struct)]
ROW = re.compile(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|", re.MULTILINE)


@pytest.mark.parametrize("struct", [*BODIES, wire.Metrics], ids=lambda struct: struct.__name__)
def test_every_field_is_named(struct: type[msgspec.Struct]) -> None:
    assert [name for name in struct.__struct_fields__ if name not in NAMED] == []


@pytest.mark.parametrize("struct", [schema.ChatBody, schema.CompletionBody])
def test_defaults_are_those_of_the_code(struct: type[msgspec.Struct]) -> None:
    said = set(ROW.findall(PAGE))
    for field in msgspec.structs.fields(struct):
        assert any(name == field.name for name, _ in said), f"{field.name} has no row"
        if isinstance(field.default, int | float):
            default = json.dumps(field.default).removesuffix(".0")
            assert (field.name, default) in said, f"{field.name} is {default} by default"


def test_every_route_is_named() -> None:
    routes = re.findall(r'web\.(get|post)\("([^"]+)"', Path(app.__file__).read_text(encoding="utf-8"))
    said = re.findall(r"^\| (GET|POST) \| `([^`]+)` \|", PAGE, re.MULTILINE)
    assert said
    assert sorted(said) == sorted((method.upper(), path.replace(":.+", "")) for method, path in routes)


def test_every_header_of_ours_is_named() -> None:
    ours = f"{origins.ALLOW_HEADERS}, {origins.EXPOSE_HEADERS}".split(", ")
    names = {name for name in ours if name.startswith("x-") and not name.startswith("x-stainless-")}
    assert names
    said = {name.lower() for name in NAMED}
    assert {re.sub("(x-ratelimit-.*)-tokens", r"\1-requests", name) for name in names} - said == set()
