"""Runs a model's Jinja template, which is code from a file that nobody here wrote. The only module that imports jinja2.

Owns the environment (Hugging Face's extras in jinja2's immutable sandbox) and the limits of a rendering. It must not
know messages or tokens.

The sandbox keeps a template from reaching Python. What it can't keep it from is taking for ever or eating memory, so
every loop is counted, every operator and number that can make a string huge is checked, and output has an end.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minserve.backend.base import CheckpointError

MAX_SOURCE = 1 << 20  # characters of a template
MAX_STRING = 16 << 20  # characters of the output, and of any string or list a template builds
MAX_NUMBER = 100_000  # as an argument of a filter or a method: a width, a count, an indent
MAX_TURNS = 1_000_000  # of all loops of one rendering
MAX_SECONDS = 10.0

_BUDGET = "_budget"


class Refused(Exception):
    """The template called raise_exception: the messages are not what it wants. Its own words."""


class Failed(Exception):
    """The template broke, or went over a limit. The message holds nothing of what it was given."""


class _Limit(jinja2.TemplateError):
    pass


class Template:
    """A compiled template. May render in several threads at once."""

    def __init__(self, source: str) -> None:
        """CheckpointError if it is no valid template."""
        if len(source) > MAX_SOURCE:
            raise CheckpointError(f"the chat template has more than {MAX_SOURCE} characters")
        try:
            tree = _ENVIRONMENT.parse(source)
            _count_loops(tree)
            code = _ENVIRONMENT.compile(tree)
            self._template = jinja2.Template.from_code(_ENVIRONMENT, code, dict(_ENVIRONMENT.globals))
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template, line {error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
            raise CheckpointError(f"the chat template can't be compiled ({type(error).__name__})") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The output. Refused or Failed, whatever the template does."""
        budget = _Budget()
        try:
            return "".join(budget.pieces(self._template.generate({**variables, _BUDGET: budget})))
        except Refused:
            raise
        except Exception as error:  # a template may fail in any way
            raise Failed(str(error) if isinstance(error, _Limit) else type(error).__name__) from error


class _Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self._turns = MAX_TURNS
        self._deadline = time.monotonic() + MAX_SECONDS

    def turns(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._turns -= 1
            if self._turns < 0 or time.monotonic() > self._deadline:
                raise _Limit("its loops take too long")
            yield item

    def pieces(self, output: Iterable[str]) -> Iterator[str]:
        length = 0
        for piece in output:
            length += len(piece)
            _check_size(length)
            yield piece


def _check_size(length: int) -> None:
    if length > MAX_STRING:
        raise _Limit("it makes too long a text")


def _check_arguments(args: Iterable[Any]) -> None:
    if any(isinstance(value, (int, float)) and abs(value) > MAX_NUMBER for value in args):
        raise _Limit(f"it uses a number over {MAX_NUMBER}")


def _check_format(text: str) -> None:
    if re.search(r"\d{5,}|%[-+ #0]*\*", text):
        raise _Limit("it formats with too large a width")


def _check_growth(name: str, value: Any, args: tuple[Any, ...]) -> None:
    """What replace and join make, as filters and as methods of a string: `value | join(by)`, `by.join(value)`."""
    if name == "replace" and len(args) > 1:
        old, new = str(args[0]), str(args[1])
        _check_size(str(value).count(old) * len(new))
    elif name == "join" and args:
        sizes = [len(v) if isinstance(v, (str, list, tuple)) else 1 for v in (value, args[0])]
        _check_size(sizes[0] * sizes[1])


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _check_arguments((left, right))
            _check_size(int(abs(right)) * 64)
        elif operator == "*":
            sizes = [len(v) if isinstance(v, (str, list, tuple)) else abs(v) for v in (left, right)]
            if any(isinstance(v, (str, list, tuple)) for v in (left, right)):
                _check_size(int(sizes[0] * sizes[1]))
        elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            _check_size(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
            _check_arguments(right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check_arguments((*args, *kwargs.values()))
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            _check_growth(obj.__name__, owner, args)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped


class _Generation(Extension):
    """{% generation %} marks what an assistant said, for training. Here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _count_loops(tree: nodes.Template) -> None:
    """`for x in items` becomes `for x in items | counted`, and `a ~ b` `a | string + b | string`, which is checked."""
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = _filtered(loop.iter, "counted")
    _replace_concat(tree)


def _replace_concat(node: nodes.Node) -> nodes.Node:
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, name, _replace_concat(value))
        elif isinstance(value, list):
            setattr(node, name, [_replace_concat(v) if isinstance(v, nodes.Node) else v for v in value])
    if not isinstance(node, nodes.Concat):
        return node
    parts = [_filtered(part, "string") for part in node.nodes]
    total: nodes.Expr = parts[0]
    for part in parts[1:]:
        total = nodes.Add(total, part, lineno=node.lineno, environment=_ENVIRONMENT)
    return total


def _filtered(value: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno, environment=_ENVIRONMENT)


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    budget: _Budget = context[_BUDGET]
    return budget.turns(items)


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that looks at its arguments first. Some take the environment or the context before the value."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        options = (*args[first + 1 :], *kwargs.values())
        _check_arguments(options)
        _check_growth(name, args[first], options)
        return function(*args, **kwargs)

    return checked


def _printf(text: str, *args: Any, **kwargs: Any) -> str:
    _check_format(str(text))
    return str(text) % (kwargs or args)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise Refused(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"], cache_size=0
    )
    filters = {**FILTERS, "tojson": _to_json, "format": _printf}
    environment.filters = {name: _checked(name, function) for name, function in filters.items()}
    environment.filters["counted"] = _counted
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


_ENVIRONMENT = _environment()
