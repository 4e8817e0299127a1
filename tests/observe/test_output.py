"""Lines that are written while nobody reads them, on real pipes."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import TextIO

import pytest
from rich.console import Console
from rich.progress import Progress

from minserve.observe.log import setup
from minserve.observe.output import MAX_LINES, Output

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pipes that refuse to wait are POSIX's")


@pytest.fixture
def pipe() -> Iterator[tuple[TextIO, TextIO]]:
    """The ends of a full pipe: the one that is read and the one that is written to."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for size in (4096, 1):
        while True:
            try:
                os.write(writing, b"." * size)
            except BlockingIOError:
                break
    os.set_blocking(writing, True)
    with open(reading, encoding="utf-8") as ours, open(writing, "w", encoding="utf-8") as theirs:
        yield ours, theirs


def test_nobody_waits_for_a_reader_and_what_is_dropped_is_counted(pipe: tuple[TextIO, TextIO]) -> None:
    with Output(pipe[1], pipe[1]) as output:
        setup("json", "info", output.errors)
        started = time.monotonic()
        for number in range(MAX_LINES + 10):
            output.say(f"line {number}")
        assert time.monotonic() - started < 1
        dropped = output.dropped
        assert dropped in (9, 10)  # the thread may hold one
        lines = [pipe[0].readline().lstrip(".") for _ in range(MAX_LINES + 11 - dropped)]
    assert json.loads(lines.pop())["event"] == f"lines dropped, since nobody read them: {dropped}"
    assert lines == [f"line {number}\n" for number in range(MAX_LINES + 10 - dropped)]


def test_an_end_waits_for_a_reader_only_for_a_while(pipe: tuple[TextIO, TextIO]) -> None:
    started = time.monotonic()
    with Output(pipe[1], pipe[1]) as output:
        output.say("nobody reads me")
    assert time.monotonic() - started < 2


def test_standard_output_and_log_keep_their_order(pipe: tuple[TextIO, TextIO]) -> None:
    with Output(pipe[1], pipe[1]) as output:
        setup("json", "info", output.errors)
        for number in range(10):
            output.say(f"said {number}")
            logging.getLogger("x").info("logged")
        read = "".join(pipe[0].readline() for _ in range(20))
    assert re.findall(r"said \d|event", read) == [part for number in range(10) for part in (f"said {number}", "event")]


def test_lines_of_a_log_go_above_a_progress_bar() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=40)
    with Progress(console=console) as bar, Output(sys.stdout, sys.stderr) as output:
        bar.add_task("lines", total=3)
        output.errors.write("logged\n")
    assert "logged\n" in shown.getvalue()
