"""The built-in pages: what lies in `static/`, read once.

Owns the file types that may be served. A name is looked up in a dictionary, never joined to a path.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from aiohttp import web

from minserve.server.errors import not_found

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@dataclass(frozen=True, slots=True)
class _File:
    data: bytes
    content_type: str
    tag: str


class Pages:
    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        for entry in resources.files("minserve.server").joinpath("static").iterdir():
            kind = _TYPES.get(entry.name.rpartition(".")[2])
            if kind is not None:
                data = entry.read_bytes()
                self._files[entry.name] = _File(data, kind, hashlib.sha256(data).hexdigest()[:16])

    async def index(self, request: web.Request) -> web.Response:
        return self._reply(request, "index.html")

    async def file(self, request: web.Request) -> web.Response:
        return self._reply(request, request.match_info["name"])

    def _reply(self, request: web.Request, name: str) -> web.Response:
        file = self._files.get(name)
        if file is None:
            raise not_found("There is no such page.", "page_not_found")
        headers = {
            "Content-Type": file.content_type,
            "Cache-Control": "no-cache",
            "Content-Security-Policy": _POLICY,
            "ETag": f'"{file.tag}"',
        }
        if file.tag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        return web.Response(body=file.data, headers=headers)
