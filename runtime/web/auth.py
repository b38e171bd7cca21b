"""The API key: asked of every request but some that must work without one, like a load balancer's health checks."""

from __future__ import annotations

import hmac
from collections.abc import Collection

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import error_body, error_headers

HEALTH_PATHS = frozenset({"/health", "/readyz", "/livez"})
METRICS_PATHS = frozenset({"/metrics", "/metrics/targets"})


def open_paths(*, metrics: bool) -> frozenset[str]:
    """What needs no key. Metrics tell how much is used, and where, so they do, unless ``metrics``."""
    return HEALTH_PATHS | METRICS_PATHS if metrics else HEALTH_PATHS


class ApiKeyAuth:
    """ASGI middleware that lets requests with ``Authorization: Bearer KEY`` through, and those for ``open_to_all``."""

    def __init__(self, app: ASGIApp, api_key: str, open_to_all: Collection[str]) -> None:
        self._app = app
        self._open_to_all = open_to_all
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401 before anything of the body is read."""
        if scope["type"] != "http" or scope["path"] in self._open_to_all or self._is_authorized(scope):
            await self._app(scope, receive, send)
            return
        body = error_body(401, 'this server needs a key; send the header "Authorization: Bearer KEY"')
        answer = Response(orjson.dumps(body), 401, error_headers(401), media_type="application/json")
        await answer(scope, receive, send)

    def _is_authorized(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)
