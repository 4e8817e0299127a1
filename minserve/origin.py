"""What an origin is, in one form: lists, page tokens and requests are compared, and only equal forms are equal.

Browsers write the Origin header in that form; people write a slash behind it, capitals, a port that is the default.
Owns the form and what is refused as no origin. It must not know who may call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

ORIGIN_WORDS = frozenset({"*", "localhost", "null"})  # of server.allowed_origins; null: sandboxed pages and files
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{0,5}))?/?", re.ASCII)
_DEFAULT_PORTS: Mapping[str, int] = {"http": 80, "https": 443}


def normal_origin(text: str) -> str:
    """An origin in lower case, without a slash at its end or its scheme's default port.

    ValueError for what no browser ever sends as one: without scheme or host, with a path, a user, a space or letters
    outside ASCII (browsers send punycode).
    """
    match = _ORIGIN.fullmatch(text.lower())
    if match is None or int(match[3] or 0) > 65535:
        raise ValueError(f"{text[:60]!r} is no origin; write scheme and host, and a port if it has one, nothing behind")
    scheme, host, port = match[1], match[2], match[3]
    if not port or int(port) == _DEFAULT_PORTS.get(scheme):
        return f"{scheme}://{host}"
    return f"{scheme}://{host}:{int(port)}"


def origin_of(header: str | None) -> str:
    """What an Origin header names, in that form. "" if it names none: no listed origin and no token's is equal."""
    try:
        return normal_origin(header or "")
    except ValueError:
        return ""
