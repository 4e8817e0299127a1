"""Listening: the port is taken before anything is loaded, held while loading, and given back when all is settled.

Owns the socket and the two applications that stand behind it in turn: one that says "loading", then the real one. It
must not know engines; `serve.py` decides when to switch.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import sys
from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from minserve.config import ServerConfig
from minserve.economics.accounting import Accounting
from minserve.request import RequestError
from minserve.server.errors import error_response, not_http
from minserve.server.middleware import (
    FIXED_HEADERS,
    GENERATING_ROUTES,
    ORIGINS,
    REFUSE,
    add_headers,
    guarded,
    observed,
    recorded,
)
from minserve.server.origins import Origins

KEEP_ALIVE_S = 75.0  # longer than what proxies in front keep, so that they never write to a closed connection
_SHUTDOWN_S = 5.0  # for handlers that still write; whatever generates has ended by then
_BACKLOG = 512


class _OurFaultsOnly(logging.Filter):
    """Drops what aiohttp logs of requests that are no HTTP: tracebacks with a stranger's bytes, perhaps a key."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_http_log = logging.getLogger("minserve.http")
_http_log.addFilter(_OurFaultsOnly())


class _Protocol(web.RequestHandler):
    """A connection. Bytes that are no HTTP get our error object too; without this aiohttp answers in plain text."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        response = super().handle_error(request, status, exc, message)  # logs; OSError if something was sent before
        if isinstance(exc, HttpProcessingError):
            response = error_response(not_http(exc.code))
            response.headers.update(FIXED_HEADERS)
            response.force_close()
        return response


def _protocols(server: web.Server) -> Callable[[], web.RequestHandler]:
    """Makes one for each connection. aiohttp offers no place for a class of ours; this one adds no state to its own."""

    def make() -> web.RequestHandler:
        protocol = server()
        protocol.__class__ = _Protocol
        return protocol

    return make


class PortInUse(Exception):
    """The message says what to do."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. PortInUse or OSError with a readable message."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, socket.gaierror) else "no host name"
        raise OSError(f"server.host: {host!r} is no address of this machine ({why})") from None
    sock = socket.socket(family, kind, protocol)
    try:
        if sys.platform == "win32":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"Port {port} on {host} is in use, perhaps by another minserve. "
                f"Stop that one, or choose another port: --port {port + 1 if port < 65535 else 8000}. "
                "Two servers at once need a folder each for their ledgers: MINSERVE_DATA"
            ) from None
        raise OSError(f"server.host, server.port: can't listen on {host} port {port} ({error.strerror})") from None
    sock.setblocking(False)
    return sock


def address_of(sock: socket.socket) -> str:
    """The URL to type into a browser."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Site:
    """One socket, one application at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._open = contextlib.AsyncExitStack()
        self.server: web.Server | None = None  # of the application that is served now

    async def serve(self, app: web.Application) -> None:
        """Put `app` behind the socket. Connections that arrive during the change wait in the backlog."""
        await self._open.aclose()
        runner = web.AppRunner(
            app,
            handler_cancellation=True,  # a client that left cancels its handler, streaming or not
            keepalive_timeout=KEEP_ALIVE_S,
            shutdown_timeout=_SHUTDOWN_S,
            access_log=None,
            logger=_http_log,
            auto_decompress=False,
        )
        self._open.push_async_callback(runner.cleanup)
        await runner.setup()
        self.server = runner.server
        assert self.server is not None
        listener = await asyncio.get_running_loop().create_server(
            _protocols(self.server), sock=self._sock.dup(), backlog=_BACKLOG
        )
        self._open.callback(listener.close)

    async def close(self) -> None:
        """Stop listening and let the handlers finish. Idempotent."""
        self._sock.close()
        await self._open.aclose()


def loading_app(config: ServerConfig, accounting: Accounting) -> web.Application:
    """Alive but not ready: what probes and impatient clients get while the model is loaded. Guards, keys, rows, request
    ids and the log are as later."""

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "loading"})

    async def ready(request: web.Request) -> web.Response:
        return web.json_response({"status": "loading"}, status=503)

    async def later(request: web.Request) -> web.Response:
        raise RequestError("The model is being loaded.", status=503, code="loading", retry_after=2)

    async def guarded_later(request: web.Request) -> web.Response:
        with recorded(request):
            identity = accounting.identify(request.headers.get("Authorization"), request.headers.get("Origin"))
        with recorded(request, identity):
            return await later(request)

    app = web.Application(middlewares=[observed, guarded])
    app[ORIGINS], app[REFUSE] = Origins(config), accounting.refuse
    app.on_response_prepare.append(add_headers)
    app.add_routes([web.get("/health", health), web.get("/ready", ready)])
    app.add_routes([web.get("/", later), web.get("/static/{name}", later)])
    app.add_routes([web.post(route, guarded_later) for route in sorted(GENERATING_ROUTES)])
    app.add_routes([web.route("*", "/{path:.*}", guarded_later)])
    return app
