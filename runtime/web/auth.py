"""The API key: asked of every request but those for health, which a load balancer must be able to make."""

from __future__ import annotations

import hmac

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import error_body, error_headers

OPEN_PATHS = frozenset({"/health", "/readyz", "/livez"})


class ApiKeyAuth:
    """ASGI middleware that lets only requests with ``Authorization: Bearer KEY`` through."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401 before anything of the body is read."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_authorized(scope):
            await self._app(scope, receive, send)
            return
        body = error_body(401, 'this server needs a key; send the header "Authorization: Bearer KEY"')
        answer = Response(orjson.dumps(body), 401, error_headers(401), media_type="application/json")
        await answer(scope, receive, send)

    def _is_authorized(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)
