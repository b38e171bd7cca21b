"""A limit on how many requests a server works on at once."""

from __future__ import annotations

from collections import Counter
from enum import Enum, auto

from starlette.types import ASGIApp, Receive, Scope, Send

from ...messages.error_codes import OVERLOADED
from .keys import Caller
from .path_guard import error_answer
from .paths import Access, PathTable


class LimitClass(Enum):
    """How a request counts against the limit."""

    FREE = auto()
    """Not at all: this process answers polls of its own state, and the admin always gets through."""
    APART = auto()
    """In a count of its own with the same limit. So a busy server still ends work and proves that it can generate. A
    router passes such requests on to its instances, so floods of them need a limit as well.
    """
    WORK = auto()
    """In the count of all other requests."""


class RequestLimit:
    """ASGI middleware: at most ``limit`` requests at a time, and a 503 with ``Retry-After`` for one more.

    Comes behind ``ApiKeyAuth``: only orders of the admin are exempt. A router without keys passes on those of all
    clients.
    """

    def __init__(self, app: ASGIApp, table: PathTable, limit: int) -> None:
        self._app = app
        self._table = table
        self._limit = limit
        self._running: Counter[LimitClass] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, or answer it with 503 before its body is read."""
        load = self._load(scope) if scope["type"] == "http" else LimitClass.FREE
        if load is LimitClass.FREE:
            await self._app(scope, receive, send)
            return
        if self._running[load] >= self._limit:
            message = f"this server is working on {self._limit} requests (--max-concurrent-requests); try again later"
            await error_answer(scope, 503, message, OVERLOADED)(scope, receive, send)
            return
        self._running[load] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running[load] -= 1

    def _load(self, scope: Scope) -> LimitClass:
        facts = self._table.find(scope["path"], scope["method"])
        if facts is None:
            return LimitClass.WORK
        if facts.access.is_admins and Caller.of(scope).is_admin:
            return LimitClass.FREE
        if facts.is_poll and facts.access is not Access.USER:
            return LimitClass.FREE
        return LimitClass.APART if facts.is_poll or facts.ends_work else LimitClass.WORK
