"""Log lines: one form for all, nothing of a prompt, nothing forged."""

from __future__ import annotations

import io
import json
import logging

import msgspec
import pytest

from minserve.economics.rows import Row
from minserve.observe.log import log_request, request_line, setup

ROW = Row(
    seq=1,
    time=1.0,
    id="req-1",
    key="web",
    user="alice",
    feature="chat",
    prompt_tokens=5,
    completion_tokens=3,
    cost=1_500_000,
    ttft_ms=12.34567,
    finish="stop",
    status=200,
)


@pytest.fixture
def lines() -> io.StringIO:
    out = io.StringIO()
    setup("json", "info", out)
    return out


def test_a_call_is_one_line_with_the_names_others_use(lines: io.StringIO) -> None:
    log_request(msgspec.structs.asdict(ROW))
    (line,) = [json.loads(text) for text in lines.getvalue().splitlines()]
    expected = {
        "event": "request",
        "level": "info",
        "request_id": "req-1",
        "api_key": "web",
        "user": "alice",
        "feature": "chat",
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "ttft_ms": 12.346,
        "finish_reason": "stop",
        "status": 200,
        "spend": 0.0015,
    }
    assert {name: line[name] for name in expected} == expected
    assert "run_id" not in line


def test_what_is_not_listed_never_gets_into_a_line() -> None:
    assert set(request_line({"id": "a", "prompt": "secret words", "text": "x", "cost": 0})) == {"request_id"}


def test_labels_can_not_forge_lines_or_flood_them() -> None:
    line = request_line({"user": 'a\nlevel=error \x1b[31m "quoted"', "feature": "f" * 1000})
    assert line["user"] == 'a?level=error ?[31m "quoted"'
    assert len(str(line["feature"])) == 128


def test_server_faults_are_warnings(lines: io.StringIO) -> None:
    log_request(msgspec.structs.asdict(msgspec.structs.replace(ROW, status=503, finish="refused", code="overloaded")))
    assert json.loads(lines.getvalue())["level"] == "warning"


def test_other_loggers_come_out_in_the_same_form(lines: io.StringIO) -> None:
    logging.getLogger("aiohttp.access").info("hello %s", "world", extra={"alert": "spend"})
    line = json.loads(lines.getvalue())
    assert (line["event"], line["logger"], line["alert"]) == ("hello world", "aiohttp.access", "spend")


def test_setting_up_again_replaces_the_form(lines: io.StringIO) -> None:
    again = io.StringIO()
    setup("console", "warning", again)
    logging.getLogger("x").info("quiet")
    logging.getLogger("x").warning("loud")
    assert lines.getvalue() == ""
    assert again.getvalue().count("\n") == 1
    assert "loud" in again.getvalue()


@pytest.mark.parametrize("form", ["console", "json"])
def test_tracebacks_do_not_show_local_variables(lines: io.StringIO, form: str) -> None:
    out = io.StringIO()
    setup(form, "info", out)  # type: ignore[arg-type]

    def fails(prompt: str) -> None:
        raise ValueError("bad")

    try:
        fails("the secret " + "prompt")
    except ValueError:
        logging.getLogger("x").exception("failed")
    assert "ValueError: bad" in out.getvalue()
    assert "the secret prompt" not in out.getvalue()
