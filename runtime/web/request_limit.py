"""A limit on how many requests a server works on at once."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ...messages.error_codes import OVERLOADED
from .path_guard import error_answer
from .paths import Access, PathTable


class RequestLimit:
    """ASGI middleware: at most ``limit`` requests at a time, and a 503 with ``Retry-After`` for one more.

    Polls, an admin's orders and paths that end work are always served.
    """

    def __init__(self, app: ASGIApp, table: PathTable, limit: int) -> None:
        self._app = app
        self._table = table
        self._limit = limit
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, or refuse it before its body is read."""
        if scope["type"] != "http" or not self._counts(scope["path"]):
            await self._app(scope, receive, send)
            return
        if self.running >= self._limit:
            message = f"this server is working on {self._limit} requests (--max-concurrent-requests); try again later"
            await error_answer(503, message, OVERLOADED)(scope, receive, send)
            return
        self.running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.running -= 1

    def _counts(self, path: str) -> bool:
        facts = self._table.find(path)
        return facts is None or not (facts.is_poll or facts.ends_work or facts.access is Access.ADMIN)
