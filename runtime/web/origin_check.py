"""Checks of the web pages that may use a server. A browser sends requests wherever a page wants, even to its own host.

There are two ways from a page to a server that asks for no key:

- The page sends a request. The browser adds the page's origin, or a note that it is another site's. It is refused.
- The page's owner lets a domain name point at 127.0.0.1, so that the server seems to be of the page's origin. This name
  is in the Host header, and a server on a loopback address knows the names that it can have.
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
    """Wrap ``app`` in the checks of web pages' origins that ``options`` ask for.

    With ``has_keys``, the Host header is not checked: a page without a key cannot do anything anyway.
    """
    origins, hosts = _words(options.allowed_origins), {name.lower() for name in _words(options.allowed_hosts)}
    checks_host = is_loopback(options.host) and not has_keys and ANY not in hosts
    guard: ASGIApp = OriginGuard(app, origins, hosts if checks_host else None)
    return Cors(guard, origins, table) if origins else guard


class Cors(CORSMiddleware):
    """Starlette's CORS, with preflights that allow the methods of a path, and fail in the API's error shape."""

    def __init__(self, app: ASGIApp, origins: Collection[str], table: PathTable) -> None:
        methods = {method for facts in table.paths for method in table.methods(facts.path)}
        super().__init__(
            app,
            allow_origins=sorted(origins),
            allow_methods=sorted(methods),
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after"],
        )
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request.

        Preflights are answered here, without asking for a key, because browsers send none with them.
        """
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            headers = Headers(scope=scope)
            if "origin" in headers and "access-control-request-method" in headers:
                await self._preflight(scope, headers)(scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    def _preflight(self, scope: Scope, asked: Headers) -> Response:
        answer = self.preflight_response(asked)
        methods = self._table.methods(scope["path"])
        names = asked.get("access-control-request-headers", "")
        answer.headers["access-control-allow-methods"] = ", ".join(methods)
        has_method = asked["access-control-request-method"] in methods
        if answer.status_code < 400 and has_method and HEADER_NAMES.fullmatch(names):
            return answer
        kept = {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}
        message = "this page may not send such a request: its origin, the method or a header is not allowed"
        return error_answer(scope, 400, message, headers=kept | {"vary": "Origin"})


class OriginGuard:
    """ASGI middleware that answers 403 to requests from pages of other origins than ``origins``.

    If ``hosts`` are given, it also refuses a Host header with a name that is neither among them nor a loopback name.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str], hosts: Collection[str] | None) -> None:
        self._app = app
        self._origins = origins
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 400 or 403 before any part of its body is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif sum(name == b"host" for name, _ in scope["headers"]) > 1:
            # A proxy in front may have gone by the other one (RFC 9112, section 3.2).
            await error_answer(scope, 400, "the request has several Host headers")(scope, receive, send)
        elif problem := self._problem(scope["headers"]):
            await error_answer(scope, 403, problem)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

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
        # Requests for an image, for example, have no origin. A user that follows a link is no other site.
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
    """Return the name or address in a Host header, without port and brackets; "" if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _words(value: str | None) -> set[str]:
    return {word.strip() for word in (value or "").split(",") if word.strip()}
