"""What uvicorn leaves out of HTTP/1.0 and of ``Expect``, added around the application of one request."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

CURRENT = "1.1"
HOP_BY_HOP = frozenset({b"connection", b"upgrade", b"http2-settings"})
UPGRADE_TOKENS = frozenset({b"upgrade", b"http2-settings"})


def for_version(app: ASGIApp, cycle: RequestResponseCycle, *, asks_to_keep: bool) -> ASGIApp:
    """Return ``app``, wrapped in middleware if the request is not plain HTTP/1.1.

    ``asks_to_keep`` says whether the request wants its connection kept open.
    """
    if cycle.scope["http_version"] != CURRENT:
        cycle.waiting_for_100_continue = False
        return Http10(app, cycle, asks_to_keep=asks_to_keep)
    return BeforeContinue(app, cycle) if cycle.waiting_for_100_continue else app


class Http10:
    """ASGI middleware for one HTTP/1.0 request: no chunks, as RFC 9112 demands.

    An answer of unknown length ends with the connection. One of known length leaves the connection open if the client
    asked for that.
    """

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle, *, asks_to_keep: bool) -> None:
        self._app = app
        self._cycle = cycle
        self._asks_to_keep = asks_to_keep
        self._ends_with_connection = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._on_start(message)
            elif self._ends_with_connection:
                # uvicorn counts down to the end of an answer without chunks: each part is as long as it is.
                self._cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_on)

    def _on_start(self, message: Message) -> None:
        headers = list(message.get("headers", ()))
        names = {name.lower() for name, _ in headers}
        has_length = b"content-length" in names or self._cycle.scope["method"] == "HEAD" or message["status"] == 204
        if not has_length:
            self._ends_with_connection = True
            self._cycle.chunked_encoding = False
        elif self._asks_to_keep and b"connection" not in names:
            self._cycle.keep_alive = True
            message["headers"] = [*headers, (b"connection", b"keep-alive")]


class BeforeContinue:
    """ASGI middleware for one request with a body that waits for ``100 Continue``.

    An answer before that ends the connection, because the body was not sent. Later bytes would be taken for it.
    """

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start" and self._cycle.waiting_for_100_continue:
                self._cycle.keep_alive = False
            await send(message)

        await self._app(scope, receive, send_on)


def head_without_upgrade(method: bytes, url: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the head of a request, ready to be parsed again, without its request to upgrade to another protocol."""
    headers = list(headers)
    tokens = [token.strip() for name, value in headers if name == b"connection" for token in value.split(b",")]
    kept = [header for header in headers if header[0] not in HOP_BY_HOP]
    kept += [(b"connection", token) for token in tokens if token.lower() not in UPGRADE_TOKENS]
    lines = [method + b" " + url + b" HTTP/" + version.encode(), *(name + b": " + value for name, value in kept)]
    return b"\r\n".join([*lines, b"", b""])
