"""The results file of a batch, in OpenAI's format: it survives being cut off, and grows by whole lines.

Owns the promise that what is in it is whole, and each input line is in it at most once. A process that dies may leave
half a line at its end; that half is dropped when the file is opened again. It must not know engines.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from minserve.file_lock import FileLock, beside
from minserve.server.batch_lines import BatchError, Key, Line
from minserve.server.wire import to_json

_OURS = b'{"id":"batch_req_'  # how every result begins
_GROUP_S = 0.1  # results that come within this time share an fsync


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
