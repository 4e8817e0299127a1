"""What every request passes: an id, a JSON error for whatever goes wrong, the guards, one log line.

Owns the order: log and errors outermost, then Host and Origin, then the key. The allow list of open routes is matched
against the *resolved* route, so no spelling of a path gets around it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator

import structlog
from aiohttp import web

from minserve.economics.keys import Identity
from minserve.economics.reservation import Admission
from minserve.request import Pool, RequestError
from minserve.server.calls import ENDPOINTS
from minserve.server.errors import error_response, forbidden, from_http, unexpected
from minserve.server.gateway import CLIENT_CLOSED
from minserve.server.origins import Origins
from minserve.server.services import SERVICES, VISIT, Visit

log = logging.getLogger("minserve.server")
request_log = logging.getLogger("minserve.request")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_ROUTES = frozenset({"/", "/static/{name}", "/health", "/ready"})
ADMIN_ROUTES = frozenset({"/metrics", "/status", "/limits/reset"})
GENERATING_ROUTES = frozenset(ENDPOINTS)
_QUIET = frozenset({"/health", "/ready", "/metrics", "/status", "/static/{name}"})  # asked again and again

FIXED_HEADERS = {"X-Content-Type-Options": "nosniff", "Server": "minserve"}  # not aiohttp's version
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def route_of(request: web.Request) -> str:
    """The pattern of the route that will answer; "" if there is none."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical


@web.middleware
async def observed(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: whatever happens inside becomes a response with a JSON body, and a line in the log."""
    asked = request.headers.get("X-Request-ID", "")
    if not _SANE_ID.fullmatch(asked):
        asked = ""
    visit = request[VISIT] = Visit(asked or "req-" + secrets.token_hex(12), named=bool(asked))
    with structlog.contextvars.bound_contextvars(**({"client_request_id": asked} if asked else {})):
        started = time.monotonic()
        response: web.StreamResponse | None = None
        try:
            response = await _answered(request, handler)
            return response
        finally:  # without a response the client has left
            status = CLIENT_CLOSED.status if response is None else response.status
            _log_line(request, visit, status, time.monotonic() - started)


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        request[VISIT].code = error.code
        return error_response(error)
    except web.HTTPException as error:
        response = error_response(from_http(error))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionError:
        return error_response(CLIENT_CLOSED)
    except Exception as error:
        log.exception("%s %s failed", request.method, route_of(request))
        return error_response(unexpected(error))


def _log_line(request: web.Request, visit: Visit, status: int, seconds: float) -> None:
    """Calls have their line from the ledger's row already."""
    route = route_of(request)
    if visit.recorded or (route in _QUIET and status != 500):
        return
    fields: dict[str, object] = {
        "request_id": visit.request_id,
        "method": request.method,
        "route": route or "(none)",
        "status": status,
        "total_ms": round(seconds * 1000, 1),
    }
    if visit.code is not None:
        fields["code"] = visit.code
    if visit.identity is not None:
        fields["user"] = visit.identity.user
    request_log.info("request", extra=fields)


@contextlib.contextmanager
def recorded(request: web.Request, identity: Identity | None = None) -> Iterator[None]:
    """A call that is refused in this block, before a route has seen it, gets its row. Other requests are no calls."""
    try:
        yield
    except RequestError as error:
        route, visit = route_of(request), request[VISIT]
        if route in GENERATING_ROUTES:
            visit.recorded = True
            request.app[REFUSE](
                Admission(
                    id=visit.request_id,
                    identity=identity,
                    endpoint=route,
                    pool=Pool.INTERACTIVE if identity is None else identity.pool(),
                    started=visit.started,
                ),
                error,
            )
        raise


@web.middleware
async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Host and Origin before the key: a browser's preflight question carries no key."""
    origins = request.app[ORIGINS]
    host, origin = request.headers.get("Host"), request.headers.get("Origin")
    with recorded(request):
        origins.check_host(host)
        if request.method == "OPTIONS" and origin is not None and "Access-Control-Request-Method" in request.headers:
            return web.Response(status=204, headers=origins.preflight(request.headers))
        origins.check_origin(origin, host, request.method)
    return await handler(request)


@web.middleware
async def authenticated(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Default deny: a key is needed everywhere but on the open routes, unknown paths included."""
    services = request.app[SERVICES]
    route = route_of(request)
    if route in OPEN_ROUTES:
        return await handler(request)
    with recorded(request):
        identity = services.accounting.identify(request.headers.get("Authorization"), request.headers.get("Origin"))
    if route in ADMIN_ROUTES and not identity.admin:
        raise forbidden("This route needs the key of an administrator.", "admin_required")
    request[VISIT].identity = identity
    return await handler(request)


def _in_our_words(request: web.Request, refusal: web.HTTPException) -> None:
    """What aiohttp refuses before any middleware, an Expect that it doesn't know. Its own words repeat the header."""
    request[VISIT] = Visit("req-" + secrets.token_hex(12))
    ours = error_response(from_http(refusal))
    refusal.body = ours.body
    refusal.headers.update({"Content-Type": "application/json", "Content-Length": str(ours.content_length)})


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """On every response, streams and errors included, before its headers leave."""
    if isinstance(response, web.HTTPException):
        _in_our_words(request, response)
    response.headers["X-Request-ID"] = request[VISIT].request_id
    response.headers.update(FIXED_HEADERS)
    for name, value in request.app[ORIGINS].headers(request.headers.get("Origin")).items():
        response.headers[name] = value
    identity = request[VISIT].identity
    if identity is not None and route_of(request) in GENERATING_ROUTES:
        response.headers.update(request.app[SERVICES].accounting.headers(identity))


ORIGINS: web.AppKey[Origins] = web.AppKey("origins", Origins)
REFUSE: web.AppKey[Callable[[Admission, RequestError], None]] = web.AppKey("refuse")
