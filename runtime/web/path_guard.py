"""Answers requests for paths and methods that do not exist, so that instances and routers do it alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ...messages.decode import shown
from .access_log import error_shape
from .errors import error_fields, error_headers
from .paths import PathFacts, PathTable


class PathGuard:
    """ASGI middleware: answers 404, 405 and OPTIONS, HEAD by way of GET, and removes slashes at a path's end.

    The application behind it sees only paths and methods of the table, spelled as the table spells them.
    """

    def __init__(self, app: ASGIApp, table: PathTable) -> None:
        self._app = app
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer with 404, 405 or OPTIONS' 204 without reading its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, method = scope["path"], scope["method"]
        facts, methods = self._table.find(path, method), self._table.methods(path)
        if facts is None:
            message = f"there is no {shown(path)}; docs/http-api.md lists what is"
            await error_answer(scope, 404, message, "unknown_url")(scope, receive, send)
            return
        if method not in methods:
            await _method_not_allowed(scope, facts, methods)(scope, receive, send)
            return
        if method == "OPTIONS":
            await Response(None, 204, _allow(methods))(scope, receive, send)
            return
        canonical = self._table.canonical(facts, path)
        if method == "HEAD" or canonical != path:
            # A copy: the server goes by its own scope's method when it leaves out the body of an answer to HEAD.
            scope = {**scope, "path": canonical, "raw_path": canonical.encode()}
            scope["method"] = "GET" if method == "HEAD" else method
        await self._app(scope, receive, send)


def error_answer(
    scope: Scope, status: int, message: str, code: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """Make the response for an error of the HTTP front itself, in the error shape of the path of ``scope``."""
    body = orjson.dumps(error_shape(scope)(error_fields(status, message, code=code)))
    return Response(body, status, {**(headers or {}), **error_headers(status)}, media_type="application/json")


def _method_not_allowed(scope: Scope, facts: PathFacts, methods: Sequence[str]) -> Response:
    message = f"{facts.label} does not take {shown(scope['method'])}, but {', '.join(methods)}"
    return error_answer(scope, 405, message, "method_not_supported", _allow(methods))


def _allow(methods: Sequence[str]) -> dict[str, str]:
    return {"allow": ", ".join(methods)}
