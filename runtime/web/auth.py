"""Who gets in: a key is asked of every request but some that must work without one, like a load balancer's checks."""

from __future__ import annotations

from collections.abc import Collection

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import error_body, error_headers
from .keys import KEY_NAME_HEADER, SCOPE_KEY, Caller, Keys
from .visits import Visit

HEALTH_PATHS = frozenset({"/health", "/readyz", "/livez"})
METRICS_PATHS = frozenset({"/metrics", "/metrics/targets"})
PAGES = frozenset({"/openapi.json", "/docs", "/redoc"})
NO_KEY = 'this server needs a key; send the header "Authorization: Bearer KEY"'
NO_ADMIN = "there is no such path for this key: one that changes what others see needs the --admin-key-file's"


def open_paths(*, metrics: bool) -> frozenset[str]:
    """What needs no key. Metrics tell how much is used, and where, so they do, unless ``metrics``."""
    return HEALTH_PATHS | METRICS_PATHS if metrics else HEALTH_PATHS


class ApiKeyAuth:
    """ASGI middleware that lets requests with a key through, and those for ``open_to_all``.

    ``users_paths``: for whoever has a key, with {NAME:path} at the end of those that go on; every other path is the
    admin's. What passes has its ``Caller`` in the scope. ``is_router``: instances are to hear whose request it is that
    is passed on to them, and see the admin key, where there is one, in the place of a client's own.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        open_to_all: Collection[str],
        users_paths: Collection[str],
        *,
        is_router: bool = False,
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_to_all = open_to_all
        self._users_paths = PAGES | {path for path in users_paths if "{" not in path}
        self._users_prefixes = tuple(path.partition("{")[0] for path in users_paths if "{" in path)
        self._is_router = is_router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401 or 403 before anything of the body is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller, path = self._keys.caller(scope["headers"]), scope["path"]
        if caller is None:
            if path not in self._open_to_all:
                await _refuse(401, NO_KEY, scope, receive, send)
                return
            caller = Caller("", is_admin=False)
        elif not (caller.is_admin or self._is_users(path)):
            await _refuse(403, NO_ADMIN, scope, receive, send)
            return
        if caller.name:
            Visit.of(scope).details["key"] = caller.name
        scope[SCOPE_KEY] = caller
        scope["headers"] = self._headers(scope["headers"], caller)
        await self._app(scope, receive, send)

    def _is_users(self, path: str) -> bool:
        return path in self._users_paths or path in self._open_to_all or path.startswith(self._users_prefixes)

    def _headers(self, headers: list[tuple[bytes, bytes]], caller: Caller) -> list[tuple[bytes, bytes]]:
        """Nobody names himself, and a router names everybody but the admin."""
        headers = [header for header in headers if header[0] != KEY_NAME_HEADER]
        if not self._is_router:
            return headers
        if not caller.is_admin:
            headers.append((KEY_NAME_HEADER, caller.name.encode()))
        if self._keys.admin is not None:
            headers = [header for header in headers if header[0] not in (b"authorization", b"x-api-key")]
            headers.append((b"authorization", b"Bearer " + self._keys.admin.encode()))
        return headers


async def _refuse(status: int, message: str, scope: Scope, receive: Receive, send: Send) -> None:
    body = orjson.dumps(error_body(status, message))
    answer = Response(body, status, error_headers(status), media_type="application/json")
    await answer(scope, receive, send)
