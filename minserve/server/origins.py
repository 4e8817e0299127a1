"""Which hosts and which pages may talk to this server: what stands between a browser and somebody else's tab.

Owns the Host check (against DNS rebinding: a foreign name that resolves to this machine), the Origin check (against
pages that post without asking) and the CORS headers for pages that may. Pure functions of a request; it must not know
keys or routes.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

from minserve.config import ServerConfig
from minserve.origin import ORIGIN_WORDS, normal_origin, origin_of
from minserve.server.errors import forbidden, shown

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{0,2000}")

ALLOW_HEADERS = ", ".join(
    (
        "authorization",
        "content-type",
        "last-event-id",
        "openai-organization",
        "openai-project",
        "x-feature",
        "x-minserve-deadline-ms",
        "x-request-id",
        "x-run-id",
        "x-run-max-calls",
        "x-run-max-spend",
        *(
            f"x-stainless-{name}"
            for name in (
                "arch",
                "async",
                "helper-method",
                "lang",
                "os",
                "package-version",
                "retry-count",
                "runtime",
                "runtime-version",
                "timeout",
            )
        ),
    )
)
EXPOSE_HEADERS = ", ".join(
    (
        "retry-after",
        "retry-after-ms",
        "x-minserve-cost",
        "x-minserve-degraded",
        "x-minserve-max-tokens",
        "x-minserve-reserved-cost",
        "x-ratelimit-limit-requests",
        "x-ratelimit-limit-tokens",
        "x-ratelimit-remaining-requests",
        "x-ratelimit-remaining-tokens",
        "x-ratelimit-reset-requests",
        "x-ratelimit-reset-tokens",
        "x-request-id",
        "x-should-retry",
    )
)


class Origins:
    def __init__(self, config: ServerConfig) -> None:
        self._hosts = {config.host.lower(), *(host.lower() for host in config.allowed_hosts)}
        self._words = ORIGIN_WORDS & {origin.lower() for origin in config.allowed_origins}
        listed = (origin for origin in config.allowed_origins if origin.lower() not in ORIGIN_WORDS)
        self._origins = frozenset(map(normal_origin, listed))

    def check_host(self, host: str | None) -> None:
        """RequestError 403 for a name this server does not go by. Addresses can't be rebound, so they pass."""
        if host is None or "*" in self._hosts:
            return
        name = _host_name(host)
        if name in _LOCAL or name in self._hosts or _is_address(name):
            return
        raise forbidden(
            f"This server does not answer to the host name {shown(name)}. Add it to server.allowed_hosts if it should.",
            "host_not_allowed",
        )

    def check_origin(self, origin: str | None, host: str | None, method: str) -> None:
        """RequestError 403 for a change that a page of a foreign, unlisted origin asks for."""
        if origin is None or method in ("GET", "HEAD") or _same(origin, host) or self.allows(origin):
            return
        raise forbidden(
            f"Pages of {shown(origin)} may not call this server. Add it to server.allowed_origins if they should.",
            "origin_not_allowed",
        )

    def allows(self, origin: str) -> bool:
        """Whether a foreign origin is listed; `localhost` lists this machine's ports, `null` pages without one."""
        normal = origin_of(origin)
        if "*" in self._words or normal in self._origins:
            return True
        if not normal:
            return origin == "null" and "null" in self._words
        return "localhost" in self._words and _host_name(_netloc(normal)) in _LOCAL

    def preflight(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The reply to a browser's question. RequestError 403 if the answer is no."""
        self.check_origin(headers["Origin"], headers.get("Host"), "OPTIONS")
        asked = headers.get("Access-Control-Request-Headers", "")
        reply = {
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Access-Control-Allow-Headers": asked if asked and _HEADER_NAMES.fullmatch(asked) else ALLOW_HEADERS,
            "Access-Control-Max-Age": "600",
        }
        if headers.get("Access-Control-Request-Private-Network") == "true":
            reply["Access-Control-Allow-Private-Network"] = "true"
        return reply

    def headers(self, origin: str | None) -> dict[str, str]:
        """What every reply carries, errors too: without it a page sees only "Failed to fetch"."""
        reply = {"Vary": "Origin"} if self._origins or self._words else {}
        if origin is not None and self.allows(origin):
            reply["Access-Control-Allow-Origin"] = origin
            reply["Access-Control-Expose-Headers"] = EXPOSE_HEADERS
        return reply


def _host_name(netloc: str) -> str:
    """The name without port, brackets and a trailing dot."""
    netloc = netloc.lower().rpartition("@")[2]
    name = netloc[1:].partition("]")[0] if netloc.startswith("[") else netloc.partition(":")[0]
    return name.rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _same(origin: str, host: str | None) -> bool:
    return host is not None and _netloc(origin.lower()) == host.lower()


def _netloc(origin: str) -> str:
    """Host and port. Not urlsplit: that raises for some of what a header may hold."""
    return origin.partition("://")[2]
