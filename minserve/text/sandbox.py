"""Runs a model's Jinja template, which is code from a file that nobody here wrote. The only module that imports jinja2.

Owns the environment: Hugging Face's extras in jinja2's immutable sandbox. It must not know messages or tokens.

The sandbox keeps a template from reaching Python. What it can't keep it from is taking for ever or eating memory: so
every loop is counted, every operator, filter and call is held to limits (sandbox_limits.py), and output has an end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from minserve.backend.base import CheckpointError
from minserve.text.sandbox_limits import (
    CURRENT,
    Budget,
    LimitError,
    check_arguments,
    check_call,
    check_format,
    check_size,
    check_weight,
    made,
)

MAX_SOURCE = 1 << 20  # characters of a template


class Refused(Exception):
    """The template called raise_exception: the messages are not what it wants. Its own words."""


class Failed(Exception):
    """The template broke, or went over a limit. The message holds nothing of what it was given."""


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
        budget = Budget()
        token = CURRENT.set(budget)
        try:
            return "".join(budget.pieces(self._template.generate(variables)))
        except Refused:
            raise
        except Exception as error:  # a template may fail in any way
            raise Failed(str(error) if isinstance(error, LimitError) else type(error).__name__) from error
        finally:
            CURRENT.reset(token)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            check_arguments((left, right))
            check_size(int(abs(right)) * 64)
        elif operator == "*":
            sizes = [len(v) if isinstance(v, (str, list, tuple)) else abs(v) for v in (left, right)]
            if any(isinstance(v, (str, list, tuple)) for v in (left, right)):
                check_size(int(sizes[0] * sizes[1]))
        elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            check_size(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            check_format(left)
            check_arguments(right if isinstance(right, tuple) else (right,))
            check_weight(right)
        return made(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        check_arguments((*args, *kwargs.values()))
        method = getattr(obj, "__wrapped__", obj)  # `str.format` comes wrapped
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            check_call(method.__name__, owner, (*args, *kwargs.values()))
        return made(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            check_format(value.__self__)
        return wrapped


class _Namespace(Namespace):
    def __repr__(self) -> str:
        """Without what it holds, which nobody has weighed."""
        return "<Namespace>"


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


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    budget = CURRENT.get()
    return iter(items) if budget is None else budget.turns(items)


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that looks at its arguments first. Some take the environment or the context before the value."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if name == "join" and not hasattr(args[first], "__len__"):
            args = (*args[:first], list(args[first]), *args[first + 1 :])  # how many there are is known only then
        check_call(name, args[first], (*args[first + 1 :], *kwargs.values()))
        return made(function(*args, **kwargs))

    return checked


def _printf(text: str, *args: Any, **kwargs: Any) -> str:
    check_format(str(text))
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


def _written(value: Any) -> Any:
    """What `{{ value }}` is about to write out."""
    if not isinstance(value, str):
        check_weight(value)
    return value


def _raise_exception(message: str) -> NoReturn:
    raise Refused(str(message))


def _strftime_now(pattern: str) -> str:
    check_size(16 * len(pattern))  # two characters may become thirty
    return datetime.now().strftime(pattern)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
        finalize=_written,
        cache_size=0,
    )
    del environment.globals["lipsum"]  # makes as many words as it is asked for
    filters = {**FILTERS, "tojson": _to_json, "format": _printf}
    environment.filters = {name: _checked(name, function) for name, function in filters.items()}
    environment.filters["counted"] = _counted
    environment.globals |= {
        "namespace": _Namespace,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    return environment


_ENVIRONMENT = _environment()
