"""Streams, events and graphs of the stand-in for CuPy.

Owns the timing: what is queued on a stream runs only when somebody waits for it, what is captured only when its graph
is launched. It must not know arrays; "owners" are whatever objects hold the memory that work touches.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from tests.simt.emulator import KernelError

Work = Callable[[], Any]
Captured = tuple[Work, list[weakref.ref[Any]]]


class Graph:
    """Kernels with the addresses they had when captured. Keeps no array alive, as in CuPy."""

    def __init__(self, work: list[Captured]) -> None:
        self._work = work

    def launch(self, stream: Stream | None = None) -> None:
        submit(self._replay, stream, (), "graph launch")

    def _replay(self) -> None:
        for work, owners in self._work:
            if any(owner() is None for owner in owners):
                raise KernelError("this graph uses an array that has been freed since the capture")
            work()


class Stream:
    null: Stream
    _all: ClassVar[weakref.WeakValueDictionary[int, Stream]] = weakref.WeakValueDictionary()
    _handles = itertools.count()

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self.ptr = next(Stream._handles)
        self._queue: deque[tuple[Work, Iterable[Any]]] = deque()
        self._recording: list[Captured] | None = None
        Stream._all[self.ptr] = self

    def __enter__(self) -> Stream:
        _current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.pop()

    def synchronize(self) -> None:
        self._must_not_capture("synchronize")
        while self._queue:
            self._run_one()

    def _run_one(self) -> None:
        work, _ = self._queue.popleft()
        work()

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        submit(event._reach, self, (), "wait_event")

    def begin_capture(self, mode: int | None = None) -> None:
        if self is Stream.null:
            raise RuntimeError("cannot capture on the default (legacy) stream")
        self._recording = []

    def end_capture(self) -> Graph:
        if self._recording is None:
            raise RuntimeError("the stream is not capturing")
        work, self._recording = self._recording, None
        return Graph(work)

    def is_capturing(self) -> bool:
        return self._recording is not None

    def _must_not_capture(self, what: str) -> None:
        if any(stream.is_capturing() for stream in (self, current())):
            raise RuntimeError(f"{what} while a stream is capturing")


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self._mark, self._reached, self._stream = 0, 0, Stream.null
        self._time = 0.0  # when it was reached

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or current()
        self._mark += 1
        mark = self._mark

        def reach() -> None:
            self._reached, self._time = mark, time.perf_counter()

        submit(reach, self._stream, (), "record")

    def _reach(self) -> None:
        while self._reached < self._mark:
            self._stream._run_one()

    @property
    def done(self) -> bool:
        return self._reached == self._mark

    def synchronize(self) -> None:
        current()._must_not_capture("synchronize")
        self._reach()


def elapsed(start: Event, end: Event) -> float:
    """Milliseconds between two events that have been reached."""
    if not (start.done and end.done):
        raise RuntimeError("the events have not been reached")
    return (end._time - start._time) * 1e3


def current() -> Stream:
    return _current[-1]


def nobody_captures(what: str) -> None:
    """RuntimeError while any stream captures: for what would break a capture on whichever stream it runs."""
    if any(stream.is_capturing() for stream in Stream._all.values()):
        raise RuntimeError(f"{what} while a stream is capturing")


def submit_kernel(work: Work, stream: Stream, owners: Iterable[Any]) -> None:
    """Queue a launch, or record it while `stream` captures. `work` holds addresses only, `owners` own what is there."""
    if stream._recording is None:
        stream._queue.append((work, tuple(owners)))
    else:
        stream._recording.append((work, [weakref.ref(owner) for owner in owners]))


def submit(work: Work, stream: Stream | None, owners: Iterable[Any], what: str) -> None:
    stream = stream or current()
    stream._must_not_capture(what)
    stream._queue.append((work, owners))


Stream.null = Stream()
_current = [Stream.null]
