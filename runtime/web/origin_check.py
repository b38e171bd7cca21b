"""Which web pages may use a server: a browser sends requests wherever a page tells it to, also to its own host.

Two ways lead from a page to a server that asks for no key. A request of the page's making carries its origin, or the
browser's word that it is another site's, and is refused. A name that the page's owner lets point at 127.0.0.1 makes the
server part of the page's origin, but stands in the Host header, where a server on a loopback address knows the names
that it can have.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ...messages.decode import shown
from .path_guard import error_answer
from .paths import PathTable
from .ports import is_loopback

ANY = "*"
READ = frozenset({b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode"})
HEADER_NAMES = re.compile(r"[!-~ \t]{0,2048}")
"""What a preflight may list: an answer repeats it."""
OTHER_SITES = frozenset({"cross-site", "same-site"})


class OriginOptions(Protocol):
    """The options of a server that say where its requests may come from."""

    @property
    def host(self) -> str: ...
    @property
    def allowed_hosts(self) -> str | None: ...
    @property
    def allowed_origins(self) -> str | None: ...


def check_origins(app: ASGIApp, options: OriginOptions, table: PathTable, *, has_keys: bool) -> ASGIApp:
    """``app`` behind the checks that ``options`` ask for. With keys, a page that has none gets nowhere by itself."""
    origins, hosts = _words(options.allowed_origins), {name.lower() for name in _words(options.allowed_hosts)}
    checks_host = is_loopback(options.host) and not has_keys and ANY not in hosts
    guard: ASGIApp = OriginGuard(app, origins, hosts if checks_host else None)
    return Cors(guard, origins, table) if origins else guard


class Cors(CORSMiddleware):
    """Starlette's CORS, whose preflights allow the methods that a path has, and fail in the API's error shape."""

    def __init__(self, app: ASGIApp, origins: Collection[str], table: PathTable) -> None:
        methods = {method for facts in table.paths for method in facts.answered_methods}
        super().__init__(
            app,
            allow_origins=sorted(origins),
            allow_methods=sorted(methods),
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers preflights without a key: browsers send none with them."""
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            headers = Headers(scope=scope)
            if "origin" in headers and "access-control-request-method" in headers:
                await self._preflight(scope["path"], headers)(scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    def _preflight(self, path: str, asked: Headers) -> Response:
        answer = self.preflight_response(asked)
        facts = self._table.find(path)
        methods = facts.answered_methods if facts is not None else ()
        names = asked.get("access-control-request-headers", "")
        answer.headers["access-control-allow-methods"] = ", ".join(methods)
        has_method = asked["access-control-request-method"] in methods
        if answer.status_code < 400 and has_method and HEADER_NAMES.fullmatch(names):
            return answer
        kept = {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}
        message = "this page may not send such a request: its origin, the method or a header is not allowed"
        return error_answer(400, message, headers=kept | {"vary": "Origin"})


class OriginGuard:
    """ASGI middleware; answers 403 to requests from pages that are not of ``origins``, and, where ``hosts`` are given,
    to those that call the server by a name that is neither theirs nor the loopback's."""

    def __init__(self, app: ASGIApp, origins: Collection[str], hosts: Collection[str] | None) -> None:
        self._app = app
        self._origins = origins
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers before anything of the body is read."""
        problem = self._problem(scope["headers"]) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        await error_answer(403, problem)(scope, receive, send)

    def _problem(self, headers: Collection[tuple[bytes, bytes]]) -> str | None:
        found = {name: value.decode("latin-1") for name, value in headers if name in READ}
        host, origin = found.get(b"host"), found.get(b"origin")
        host = None if host is None else host.lower()
        if host is not None and self._hosts is not None:
            name = host_name(host)
            if name not in self._hosts and not is_loopback(name):
                return (
                    f"the Host header says {shown(name)!r}, which is no name of this host's own: "
                    "start the server with --allowed-hosts to be called so"
                )
        if origin is not None and not self._is_allowed(origin, host):
            return f"a page of {shown(origin)!r} may not use this server: start it with --allowed-origins to let it"
        # An image's source, say, is asked for without an origin. Someone who follows a link comes himself.
        by_page = found.get(b"sec-fetch-site") in OTHER_SITES and found.get(b"sec-fetch-mode") != "navigate"
        if by_page and origin is None and ANY not in self._origins:
            return "a page of another site may not use this server"
        return None

    def _is_allowed(self, origin: str, host: str | None) -> bool:
        if ANY in self._origins or origin in self._origins:
            return True
        scheme, _, place = origin.partition("://")
        return host is not None and scheme in ("http", "https") and place.lower() == host


def host_name(host: str) -> str:
    """The name or address in a Host header, without port and brackets; "" where it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _words(value: str | None) -> set[str]:
    return {word.strip() for word in (value or "").split(",") if word.strip()}
