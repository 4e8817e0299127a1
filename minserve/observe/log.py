"""Logging: one structured line per call, for people on a console or for machines as JSON; never any text of a prompt.

Owns the set-up of logging and which fields a call's line may have. Everything logs through the standard library
(aiohttp too) and comes out in the same form, which is structlog's.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Literal, TextIO

import structlog
from structlog.dev import Column, KeyValueColumnFormatter
from structlog.typing import Processor

from minserve.observe.output import Lines

log = logging.getLogger("minserve.request")

# Names as LiteLLM's SpendLogs has them where they mean the same. What is not listed can't slip into a line.
_FIELDS: dict[str, str] = {
    "request_id": "id",
    "api_key": "key",
    "user": "user",
    "end_user": "end_user",
    "feature": "feature",
    "run_id": "run",
    "pool": "pool",
    "model": "model",
    "call_type": "endpoint",
    "prompt_tokens": "prompt_tokens",
    "cached_tokens": "cached_tokens",
    "completion_tokens": "completion_tokens",
    "max_tokens": "max_tokens",
    "queue_ms": "queue_ms",
    "ttft_ms": "ttft_ms",
    "itl_p50_ms": "itl_p50_ms",
    "itl_p99_ms": "itl_p99_ms",
    "total_ms": "total_ms",
    "finish_reason": "finish",
    "status": "status",
    "code": "code",
    "degraded": "degraded",
}
_LONGEST = 128


def setup(
    form: Literal["console", "json"] = "console", level: str = "info", stream: TextIO | Lines | None = None
) -> None:
    """Send every logger's lines to `stream` (default: standard error). May be called again."""
    stream = stream or sys.stderr
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=form == "json"),
    ]
    render: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if form == "json":
        render += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(sort_keys=False)]
    else:
        # structlog's default would print the values of local variables, and among them prompts.
        plain = structlog.dev.plain_traceback
        console = structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=plain)
        console.columns = [_lean(column) for column in console.columns]
        render += [console]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=render))
    root = logging.getLogger()
    for old in root.handlers[:]:
        if isinstance(old.formatter, structlog.stdlib.ProcessorFormatter):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())


def _lean(column: Column) -> Column:
    """The same `key=value` for a quarter of the time, where it is nothing more: a call's line has two dozen of them."""
    own = column.formatter
    if column.key or not isinstance(own, KeyValueColumnFormatter):
        return column
    before, between, after = own.key_style or "", f"{own.reset_style}={own.value_style}", own.reset_style
    return Column("", lambda key, value: f"{before}{key}{between}{own.value_repr(value)}{after}")


def request_line(row: Mapping[str, object]) -> dict[str, object]:
    """The fields of a call's line from its ledger row: only listed ones, none empty, text cut and printable."""
    line: dict[str, object] = {}
    for name, column in _FIELDS.items():
        value = row.get(column)
        if value is None or value == "":
            continue
        line[name] = _clean(value) if isinstance(value, str) else round(value, 3) if isinstance(value, float) else value
    cost = row.get("cost")
    if isinstance(cost, int) and cost:
        line["spend"] = cost / 1e9
    return line


def log_request(row: Mapping[str, object]) -> None:
    """One line for a finished call; failed ones are warnings."""
    line = request_line(row)
    status = row.get("status")
    bad = isinstance(status, int) and status >= 500
    log.log(logging.WARNING if bad else logging.INFO, "request", extra=line)


def _clean(text: str) -> str:
    """One line, no control characters: a client's label can't forge a line or move a terminal's cursor."""
    shown = text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
    return shown[:_LONGEST]
