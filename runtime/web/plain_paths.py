"""Paths that would not mean the same to everybody who reads them: router and instance, a check and a route."""

from __future__ import annotations

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ...messages.decode import shown
from .errors import error_body

DOT_SEGMENTS = frozenset({".", ".."})


class PlainPaths:
    """ASGI middleware that knows no path with ``.`` or ``..`` in it, which would lead elsewhere at an instance, and
    none with what can't be printed: a route's pattern overlooks a line's end behind it, and what compares paths does
    not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 404 to such a path."""
        if scope["type"] != "http" or is_plain(scope["path"]):
            return await self._app(scope, receive, send)
        body = error_body(404, f"{shown(scope['path'])}: Not Found", "not_found_error")
        await Response(orjson.dumps(body), 404, media_type="application/json")(scope, receive, send)


def is_plain(path: str) -> bool:
    """Whether a path, percent signs decoded, holds neither dot segments nor what can't be printed."""
    return path.isprintable() and DOT_SEGMENTS.isdisjoint(path.split("/"))
