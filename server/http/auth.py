"""The API key: asked of every request but ``GET /health``, which a load balancer must be able to make."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError

OPEN_PATHS = frozenset({"/health"})


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
        error = ApiError(401, 'this server needs a key; send the header "Authorization: Bearer KEY"')
        await error.response()(scope, receive, send)

    def _is_authorized(self, scope: Scope) -> bool:
        given = Headers(scope=scope).get("authorization", "")
        return hmac.compare_digest(given.encode("latin-1"), self._expected)
