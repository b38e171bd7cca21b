"""Access: which requests need a key, and which keys may use a path."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from .keys import KEY_NAME_HEADER, SCOPE_KEY, Caller, Keys
from .path_guard import error_answer
from .paths import Access, PathTable
from .visits import Visit

NO_KEY = 'this server needs a key; send the header "Authorization: Bearer KEY"'
NO_ADMIN = "this key may not use this path, which shows or changes what is others': it needs the --admin-key-file's"


class ApiKeyAuth:
    """ASGI middleware that refuses requests whose key may not use their path.

    A request that passes has its ``Caller`` in the scope. A path that is not in ``table`` passes with any key: the
    application behind must not serve it (``PathGuard``). ``metrics_are_open``: ``--metrics-without-key``.
    ``is_router``: instances are told whose request is passed on to them, and see the admin key, where there is one, in
    the place of a client's own.
    """

    def __init__(
        self, app: ASGIApp, keys: Keys, table: PathTable, *, metrics_are_open: bool = False, is_router: bool = False
    ) -> None:
        self._app = app
        self._keys = keys
        self._table = table
        self._open = {Access.OPEN, Access.METRICS} if metrics_are_open else {Access.OPEN}
        self._is_router = is_router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401 or 403 before anything of the body is read.

        Raises ``NotImplementedError`` for a protocol that nothing here checks, so that adding an endpoint of one can't
        bypass the keys.
        """
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise NotImplementedError(f"no access rules for {scope['type']!r}")
        caller, facts = self._keys.caller(scope["headers"]), self._table.find(scope["path"])
        access = facts.access if facts is not None else Access.USER
        if caller is None:
            if access not in self._open:
                await error_answer(401, NO_KEY)(scope, receive, send)
                return
            caller = Caller("", is_admin=False)
        else:
            Visit.of(scope).is_known = True
            if access is Access.ADMIN and not caller.is_admin:
                await error_answer(403, NO_ADMIN)(scope, receive, send)
                return
        if caller.name:
            Visit.of(scope).details["key"] = caller.name
        scope[SCOPE_KEY] = caller
        scope["headers"] = self._headers(scope["headers"], caller)
        await self._app(scope, receive, send)

    def _headers(self, headers: list[tuple[bytes, bytes]], caller: Caller) -> list[tuple[bytes, bytes]]:
        """Headers without a key name of the client's own; a router names every caller but the admin."""
        headers = [header for header in headers if header[0] != KEY_NAME_HEADER]
        if not self._is_router:
            return headers
        if not caller.is_admin:
            headers.append((KEY_NAME_HEADER, caller.name.encode()))
        if self._keys.admin is not None:
            headers = [header for header in headers if header[0] not in (b"authorization", b"x-api-key")]
            headers.append((b"authorization", b"Bearer " + self._keys.admin.encode()))
        return headers
