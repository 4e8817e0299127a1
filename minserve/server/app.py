"""The application: which route is answered by what, behind which middleware.

Owns the route table. Everything a route needs is in its Services; nothing is global.
"""

from __future__ import annotations

from aiohttp import web

from minserve.server.generate import GenerateRoutes
from minserve.server.info import InfoRoutes
from minserve.server.middleware import ORIGINS, REFUSE, add_headers, authenticated, guarded, observed
from minserve.server.origins import Origins
from minserve.server.pages import Pages
from minserve.server.services import SERVICES, Services


def create_app(services: Services) -> web.Application:
    """An aiohttp application; `site.Site` serves it, tests put it behind any runner."""
    app = web.Application(
        middlewares=[observed, guarded, authenticated],
        client_max_size=services.config.limits.max_body_bytes,
    )
    app[SERVICES] = services
    app[ORIGINS] = Origins(services.config.server)
    app[REFUSE] = services.gateway.refuse
    app.on_response_prepare.append(add_headers)
    generate, info, pages = GenerateRoutes(services), InfoRoutes(services), Pages()
    app.add_routes(
        [
            web.post("/v1/chat/completions", generate.chat),
            web.post("/v1/completions", generate.completions),
            web.post("/v1/chat/completions/render", info.render),
            web.get("/v1/models", info.models),
            web.get("/v1/models/{model:.+}", info.model),
            web.post("/tokenize", info.tokenize),
            web.post("/detokenize", info.detokenize),
            web.post("/abort", info.abort),
            web.post("/limits/reset", info.reset),
            web.get("/health", info.health),
            web.get("/ready", info.ready),
            web.get("/metrics", info.metrics),
            web.get("/status", info.status),
            web.get("/version", info.version),
            web.get("/", pages.index),
            web.get("/static/{name}", pages.file),
        ]
    )
    return app
