"""The two files of a batch, line by line: OpenAI's batch input format, and results that survive being cut off.

Owns the formats and the promise of the results file: what is in it is whole, and each input line is in it at most once.
A process that dies may leave half a line at its end; that half is dropped when the file is opened again. It must not
know engines.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from minserve.file_lock import FileLock, beside
from minserve.server.calls import ENDPOINTS
from minserve.server.wire import to_json

_OURS = b'{"id":"batch_req_'  # how every result begins
_GROUP_S = 0.1  # results that come within this time share an fsync
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


class _Result(msgspec.Struct):
    """What is read of a result again."""

    custom_id: str | None
    response: _Response | None
    error: _Fault | None

    @property
    def key(self) -> Key | None:
        return self.error.line if self.custom_id is None and self.error is not None else self.custom_id

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code != 200


class _Response(msgspec.Struct):
    status_code: int


class _Fault(msgspec.Struct):
    line: int


def answered(line: Line, request_id: str, status: int, body: Any, degraded: str = "") -> dict[str, Any]:
    """The result of a line that was run, also where it was refused or failed: then `body` is an error object.

    degraded: what was cut under load; a field of the response only where something was.
    """
    response = {"status_code": status, "request_id": request_id, "body": body}
    if degraded:
        response["degraded"] = degraded
    return {"id": _result_id(), "custom_id": line.custom_id, "response": response, "error": None}


def faulty(line: Line) -> dict[str, Any]:
    """The result of a line that could not be run at all."""
    error = {"code": "invalid_line", "message": line.fault, "param": None, "line": line.number}
    return {"id": _result_id(), "custom_id": line.custom_id, "response": None, "error": error}


def _result_id() -> str:
    return "batch_req_" + secrets.token_hex(12)


@dataclass(frozen=True, slots=True)
class Held:
    """What a results file holds. size: bytes of its whole lines; more than that is half a line."""

    done: frozenset[Key]
    failed: int
    size: int


def read_results(path: Path) -> Held:
    """BatchError if the file can't be read, or holds something that is no result of a batch."""
    done: set[Key] = set()
    failed = size = 0
    try:
        with path.open("rb") as file:
            for number, data in enumerate(file, 1):
                result = _result(data)
                if result is None or result.key is None:
                    if data.startswith(_OURS[: len(data)]) and not file.peek(1):
                        break  # cut off while it was written
                    raise BatchError(f"{path}: line {number} is no result of a batch; is this the right file?")
                size += len(data)
                done.add(result.key)
                failed += result.failed
    except FileNotFoundError:
        pass
    except OSError as error:
        raise BatchError(f"{path}: {error.strerror}") from None
    return Held(frozenset(done), failed, size)


def _result(data: bytes) -> _Result | None:
    if not (data.startswith(_OURS) and data.endswith(b"\n")):
        return None
    try:
        return msgspec.json.decode(data, type=_Result)
    except msgspec.DecodeError:
        return None


class Results:
    """The results file, opened for more; half a line at its end is dropped. One process at a time.

    `add` returns at once; what has gathered is written and fsynced together on a thread. `failure` is set when that
    did not work: nothing more is written then.
    """

    def __init__(self, path: Path) -> None:
        """BatchError as `read_results`, if another process writes the file, and if nobody can."""
        with ExitStack() as opened:
            try:
                opened.callback(FileLock(beside(path)).release)
                self._file = opened.enter_context(path.open("ab"))
            except BlockingIOError:
                raise BatchError(f"{path} is being written by another run of minserve batch") from None
            except OSError as error:
                raise BatchError(f"{path} can't be written: {error.strerror}") from None
            held = read_results(path)
            self._file.truncate(held.size)
            self._opened = opened.pop_all()
        self.done = set(held.done)
        self.failed = held.failed
        self.failure: OSError | None = None
        self._waiting: list[bytes] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, line: Line, result: dict[str, Any], *, failed: bool) -> None:
        self.done.add(line.key)
        self.failed += failed
        self._waiting.append(to_json(result) + b"\n")
        if self._task is None:
            self._task = asyncio.create_task(self._write_soon())

    async def close(self) -> None:
        """Write what is left."""
        if self._task is not None:
            await self._task
        self._opened.close()

    async def _write_soon(self) -> None:
        while self._waiting and self.failure is None:
            await asyncio.sleep(_GROUP_S)
            lines, self._waiting = self._waiting, []
            try:
                await asyncio.to_thread(self._write, b"".join(lines))
            except OSError as error:
                self.failure = error
        self._task = None

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())
