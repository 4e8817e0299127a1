"""What one rendering of a template may use: turns of its loops, seconds, and the size of what it makes.

Owns the limits and the checks that hold an operation to them before it runs. It must not know jinja2.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

MAX_STRING = 16 << 20  # characters of the output, and of any string or list a template builds
MAX_MADE = 256 << 20  # bytes, about, of all strings and lists that one rendering builds
MAX_NUMBER = 100_000  # as an argument of a filter or a method: a width, a count, an indent
MAX_TURNS = 1_000_000  # of all loops of one rendering
MAX_SECONDS = 10.0

# Filters that look at the items of a list and leave them as they are; every other one may write them out.
_SHALLOW = frozenset(
    {"attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length"}
)
_SHALLOW |= {"list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice"}
_SHALLOW |= {"sort", "sum", "unique"}
_SLOW = frozenset({"urlize", "wordwrap"})  # a microsecond a character

_POINTER = 8  # bytes an item takes in a list

T = TypeVar("T")


class LimitError(Exception):
    """A limit, in words that hold nothing of what the template was given."""


class Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self._turns = MAX_TURNS
        self._made = MAX_MADE
        self._deadline = time.monotonic() + MAX_SECONDS

    def turns(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._turns -= 1
            if self._turns < 0:
                raise LimitError("its loops take too long")
            self._check_time()
            yield item

    def pieces(self, output: Iterable[str]) -> Iterator[str]:
        length = 0
        for piece in output:
            length += len(piece)
            check_size(length)
            yield piece

    def make(self, value: object) -> None:
        """Count what an operation has made."""
        if isinstance(value, (str, list, tuple)):
            self._made -= len(value) * (1 if isinstance(value, str) else _POINTER)
            if self._made < 0:
                raise LimitError("it makes too much text")
        self._check_time()

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise LimitError("it takes too long")


CURRENT: ContextVar[Budget | None] = ContextVar("budget", default=None)  # None: a template is being compiled


def made(value: T) -> T:
    budget = CURRENT.get()
    if budget is not None:
        budget.make(value)
    return value


def check_size(length: int) -> None:
    if length > MAX_STRING:
        raise LimitError("it makes too long a text")


def check_weight(*values: Any) -> None:
    """What writing these out would take, nested ones as often as they occur."""
    weight, left = 0, list(values)
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            left += value
        if isinstance(value, (str, list, tuple, Mapping)):
            weight += len(value)
            check_size(weight)


def check_arguments(args: Iterable[Any]) -> None:
    if any(isinstance(value, (int, float)) and abs(value) > MAX_NUMBER for value in args):
        raise LimitError(f"it uses a number over {MAX_NUMBER}")


def check_format(text: str) -> None:
    if re.search(r"\d{5,}|%[-+ #0]*\*", text):
        raise LimitError("it formats with too large a width")


def check_call(name: str, value: Any, args: tuple[Any, ...]) -> None:
    """A filter, or a method of a string: `value | join(by)`, `by.join(value)`. args may stand in any order."""
    check_arguments(args)
    if name not in _SHALLOW:
        check_weight(value, *args)
    texts = [str(arg) for arg in args if isinstance(arg, (str, int))]
    if name == "replace":
        check_size(max((str(value).count(text) for text in texts), default=0) * max(map(len, texts), default=0))
    elif name == "join":  # of the two longest one is the list, the other what goes between its items
        check_size(math.prod(sorted(len(v) for v in (value, *args) if hasattr(v, "__len__"))[-2:]))
    elif name == "indent":
        widths = (len(arg) if isinstance(arg, str) else int(arg) for arg in args if isinstance(arg, (str, int)))
        check_size((str(value).count("\n") + 1) * max(widths, default=0))
    elif name == "expandtabs" and args:
        check_size(str(value).count("\t") * int(args[0]))
    elif name == "translate":
        raise LimitError("it translates characters")
    elif name in _SLOW:
        check_size(16 * len(str(value)))
