"""What a client is told when something goes wrong: one body shape, one place that maps causes to statuses.

Owns OpenAI's error object and the headers that steer an SDK's retries. It must not know routes or the engine. Nothing
of the request's text is repeated in a message, and values are cut short.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from minserve.economics.prices import NANO, money
from minserve.request import RequestError

log = logging.getLogger("minserve.server")

_SHOWN_CHARACTERS = 60
_SDK_PATIENCE_S = 60.0  # OpenAI's SDKs don't wait longer: they would ignore a longer Retry-After and come back at once

_KINDS = {403: "permission_error", 404: "not_found_error"}  # the others: RequestError's own

_MESSAGES = {
    404: "There is no such route.",
    405: "This route does not answer that method.",
    413: "The request body is larger than this server accepts.",
}

_CODES = {
    404: "route_not_found",
    405: "method_not_allowed",
    413: "body_too_large",
}


def shown(value: object) -> str:
    """A client's value as it may stand in a message: one line, short."""
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def error_body(error: RequestError, *, in_stream: bool = False) -> dict[str, Any]:
    """OpenAI's error object. in_stream: with `retry_after` and `cost`: the headers that would say so are gone."""
    fields: dict[str, Any] = {
        "message": error.message,
        "type": error.kind,
        "param": error.param,
        "code": error.code,
    }
    if in_stream and error.retry_after is not None:
        fields["retry_after"] = math.ceil(error.retry_after)
    if in_stream and error.reserved and error.cost is not None:
        fields["cost"] = error.cost / NANO
    return {"error": fields}


def error_headers(error: RequestError) -> dict[str, str]:
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(0, math.ceil(error.retry_after)))
    if error.should_retry is not None:
        headers["x-should-retry"] = "true" if error.should_retry else "false"
    elif error.retry_after is not None and error.retry_after > _SDK_PATIENCE_S:
        headers["x-should-retry"] = "false"
    if error.degraded:
        headers["x-minserve-degraded"] = error.degraded
    if error.reserved is not None:
        headers["x-minserve-reserved-cost"] = money(error.reserved)
    if error.cost is not None:
        headers["x-minserve-cost"] = money(error.cost)
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def error_response(error: RequestError) -> web.Response:
    return web.Response(
        status=error.status,
        body=msgspec.json.encode(error_body(error)),
        content_type="application/json",
        headers=error_headers(error),
    )


def from_http(error: web.HTTPException) -> RequestError:
    """aiohttp's own refusals (no such route, wrong method, body too large) in our words."""
    status = error.status
    message = _MESSAGES.get(status) or f"{HTTPStatus(status).phrase}."
    return RequestError(message, status=status, code=_CODES.get(status, "http_error"), kind=_KINDS.get(status))


def not_http(status: int) -> RequestError:
    """What came over the wire could not be read. Its bytes are not repeated: they may hold a key."""
    return RequestError("The request is not valid HTTP.", status=status, code="invalid_http")


def unexpected(error: Exception) -> RequestError:
    """A fault of ours: the class name helps a bug report, its message could hold the client's text or our paths."""
    return RequestError(f"The server failed ({type(error).__name__}).", status=500, code="internal_error")


@contextmanager
def faults_told(call_id: str) -> Iterator[None]:
    """What a call dies of in this block without being a RequestError is a fault of ours: logged, and told as a 500."""
    try:
        yield
    except (RequestError, ConnectionError):
        raise
    except Exception as error:
        log.exception("call %s failed", call_id)
        raise unexpected(error) from None


def forbidden(message: str, code: str) -> RequestError:
    return RequestError(message, status=403, code=code, kind=_KINDS[403])


def not_found(message: str, code: str, param: str | None = None) -> RequestError:
    return RequestError(message, status=404, code=code, param=param, kind=_KINDS[404])
