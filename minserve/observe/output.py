"""Lines for whoever watches the process. Writing one never waits, though its reader may have stopped to read.

Owns the thread that writes them, in the order in which they came. What it can't keep up with is dropped, and counted.
It must not know what the lines say.
"""

from __future__ import annotations

import io
import logging
import queue
import threading
from contextlib import suppress
from typing import TextIO

log = logging.getLogger("minserve.output")

MAX_LINES = 10_000  # that wait to be written: a few MB


class Output:
    """What is written to `out` and `errors` goes to the streams of these names. Used in a `with`."""

    def __init__(self, out: TextIO, errors: TextIO) -> None:
        self.dropped = 0  # lines, since the start
        self._lines: queue.SimpleQueue[tuple[TextIO, str] | None] = queue.SimpleQueue()
        self.out, self.errors = Lines(self, out), Lines(self, errors)
        self._thread = threading.Thread(target=self._work, name="minserve-output", daemon=True)
        self._thread.start()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, line: str) -> None:
        self.out.write(line + "\n")

    def put(self, stream: TextIO, text: str) -> None:
        if self._lines.qsize() < MAX_LINES:
            self._lines.put((stream, text))
        else:
            self.dropped += 1

    def close(self, timeout: float = 1.0) -> None:
        """Return when everything is written, or `timeout` seconds have passed. Idempotent."""
        self._lines.put(None)
        self._thread.join(timeout)

    def _work(self) -> None:
        told = 0
        while (entry := self._lines.get()) is not None:
            stream, text = entry
            with suppress(OSError, ValueError):  # the reader is gone, the disk full: nothing to tell it to
                stream.write(text)
                stream.flush()
            if self.dropped > told and self._lines.empty():
                log.warning("lines dropped, since nobody read them: %d", self.dropped - told)
                told = self.dropped


class Lines:
    """As much of a text file as logging needs."""

    def __init__(self, output: Output, stream: TextIO) -> None:
        self._output = output
        self._stream = _unshared(stream)

    def write(self, text: str) -> None:
        self._output.put(self._stream, text)

    def flush(self) -> None:
        """The thread does, after each line."""

    def isatty(self) -> bool:
        return self._stream.isatty()


def _unshared(stream: TextIO) -> TextIO:
    """The same file behind a buffer of its own: Python flushes the standard ones when it exits, and aborts if a thread
    that hangs in a write holds them. What stands before a file, as Rich's progress bars do, stays there."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        return open(stream.fileno(), "w", encoding=stream.encoding, errors=stream.errors, closefd=False)
    except io.UnsupportedOperation:  # no file of the operating system's
        return stream
