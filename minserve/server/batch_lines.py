"""The lines of a batch's input file: OpenAI's batch input format.

Owns what a line may be, and what is wrong with one that can't be run. It must not know engines or results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from minserve.server.calls import ENDPOINTS

_MAX_ID = 512

Key = str | int  # a line's custom_id, or its number where it has none


class BatchError(ValueError):
    """A file that can't be used; the message names it and the line."""


@dataclass(frozen=True, slots=True)
class Line:
    """One input line, 1-based. fault: why it can't be run; then url and body mean nothing."""

    number: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    fault: str | None = None

    @property
    def key(self) -> Key:
        return self.number if self.custom_id is None else self.custom_id


class _Input(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Named(msgspec.Struct):
    custom_id: str


def read_lines(path: Path, max_bytes: int) -> Iterator[Line]:
    """Every line that is not blank. One that is longer than `max_bytes` or malformed comes with its fault."""
    with path.open("rb") as file:
        number = 0
        while data := file.readline(max_bytes + 1):
            number += 1
            if len(data) > max_bytes and not data.endswith(b"\n"):
                _skip_line(file)
                yield Line(number, None, fault=f"The line is longer than {max_bytes} bytes.")
            elif data.strip():
                yield _line(number, data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data)


def _skip_line(file: BinaryIO) -> None:
    while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
        pass


def _line(number: int, data: bytes) -> Line:
    try:
        line = msgspec.json.decode(data, type=_Input)
    except (msgspec.DecodeError, RecursionError) as error:
        return Line(number, _custom_id(data), fault=f"Not a batch line: {error}.")
    fault = None
    if not 0 < len(line.custom_id) <= _MAX_ID:
        return Line(number, None, fault=f"custom_id must have 1 to {_MAX_ID} characters.")
    if line.method != "POST":
        fault = "method must be POST."
    elif line.url not in ENDPOINTS:
        fault = f"url must be one of {', '.join(ENDPOINTS)}."
    return Line(number, line.custom_id, line.url, bytes(line.body), fault)


def _custom_id(data: bytes) -> str | None:
    """The id of a line that is wrong in other ways, if it can be read at all."""
    try:
        name = msgspec.json.decode(data, type=_Named).custom_id
    except (msgspec.DecodeError, RecursionError):
        return None
    return name if 0 < len(name) <= _MAX_ID else None


def scan(path: Path, max_bytes: int) -> set[Key]:
    """The keys of all lines. BatchError if two lines have the same custom_id: nobody could tell their results apart."""
    seen: dict[Key, int] = {}
    try:
        for line in read_lines(path, max_bytes):
            if line.key in seen:
                raise BatchError(
                    f"{path}: lines {seen[line.key]} and {line.number} have the same custom_id {line.key!r}"
                )
            seen[line.key] = line.number
    except OSError as error:
        raise BatchError(f"{path}: {error.strerror}") from None
    return set(seen)
