"""The load generator's HTTP client: callbacks from the socket to the recorder, no stream objects in between.

It uses the same connections as the router. A chunk costs one parser call, and its time is taken when the event loop
hands over the bytes. A general client would take a good part of a core of the machine that it measures. It would also
delay its own time stamps. docs/benchmarks.md has the figures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

import orjson

from ..runtime.web.client.client import RESEND_IDLE_SECONDS, header_lines, request_head
from ..runtime.web.client.connection import Connection, Headers
from ..runtime.web.client.errors import ClientError, ConnectionGone
from ..runtime.web.client.pool import ConnectionPool, Origin
from .errors import RequestError

CONNECT_TIMEOUT_SECONDS = 10.0
MAX_ERROR_CHARS = 300
Clock = Callable[[], float]


class BodySink(Protocol):
    """Takes the body of a 200 as it arrives."""

    def feed(self, data: bytes, at: float) -> None:
        """Take the next bytes of the body. ``at``: when they arrived, in seconds of the client's clock."""


class _WholeBody:
    """Sink that keeps a body."""

    def __init__(self) -> None:
        self.data = bytearray()

    def feed(self, data: bytes, at: float) -> None:
        """Append ``data``; ``at``, its time, is ignored."""
        self.data += data


class _TimedConnection(Connection):
    """``now``: when the bytes came that are being parsed."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self.now = 0.0

    def data_received(self, data: bytes) -> None:
        self.now = self._clock()
        super().data_received(data)


class _Exchange:
    """One request and its answer: what a ``ResponseReceiver`` is. ``error``: the body of another status than 200."""

    def __init__(self, connection: _TimedConnection, sink: BodySink) -> None:
        self.error = bytearray()
        self._connection = connection
        self._sink = sink
        self._status = 0
        self._done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self, message: bytes) -> int:
        """Send ``message``, wait for the whole answer, and return its status; raises ``ClientError``.

        If this is cancelled before the end, the connection is closed.
        """
        self._connection.ask([message], self)
        try:
            return await self._done
        finally:
            # Cancelled in the middle of an answer: the rest of it must not reach the next request.
            if not self._done.done() or self._done.cancelled():
                self._connection.close()

    def take_head(self, status: int, headers: Headers) -> None:
        """Keep the status; the headers are not needed."""
        self._status = status

    def take_body(self, data: bytes) -> None:
        """Pass the body of a 200 to the sink with its time of arrival; keep any other as the error."""
        if self._status == 200:
            self._sink.feed(data, self._connection.now)
        else:
            self.error += data

    def take_end(self, error: ClientError | None) -> None:
        """Complete the future with the status, or with ``error`` if the connection failed before the answer's end."""
        if self._done.done():
            return
        if error is None:
            self._done.set_result(self._status)
        else:
            self._done.set_exception(error)


class HttpClient:
    """Requests to one server, over as many kept-alive connections as there are requests at a time.

    ``clock``: what chunks are timed by, in seconds.
    """

    def __init__(self, base_url: str, api_key: str | None = None, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        url = urlsplit(base_url)
        self._path = url.path.rstrip("/")
        headers = [(b"host", url.netloc.rpartition("@")[2].encode()), (b"accept", b"*/*")]
        if api_key:
            headers.append((b"authorization", f"Bearer {api_key}".encode()))
        self._headers = header_lines(headers)
        self._pool = ConnectionPool(Origin.of(base_url), lambda: _TimedConnection(clock), CONNECT_TIMEOUT_SECONDS)

    async def get_json(self, path: str) -> Any:
        """Return the decoded JSON body of the answer to GET ``path``.

        Raises ``RequestError``, also for a status other than 200.
        """
        return _parse(path, await self._read(self._message("GET", path, b"")))

    async def post(self, path: str, body: bytes = b"") -> bytes:
        """Return the body of the answer to POST ``path``. Raises ``RequestError``, also for a status other than 200."""
        return await self._read(self._message("POST", path, body))

    async def post_stream(self, path: str, body: bytes, sink: BodySink) -> None:
        """POST ``body``, feed the answer to ``sink`` as it arrives, and return at its end.

        Raises ``RequestError`` for a status other than 200, or if the answer breaks off.
        """
        await self._request(self._message("POST", path, body), sink)

    def close(self) -> None:
        """Close the idle connections."""
        self._pool.close()

    def _message(self, method: str, path: str, body: bytes) -> bytes:
        own = header_lines([(b"content-type", b"application/json")]) if method == "POST" else b""
        return request_head(method, self._path + path, self._headers, own, len(body)) + body

    async def _read(self, message: bytes) -> bytes:
        body = _WholeBody()
        await self._request(message, body)
        return bytes(body.data)

    async def _request(self, message: bytes, sink: BodySink) -> None:
        try:
            while True:
                kept = self._pool.take_kept()
                connection = kept.connection if kept is not None else await self._pool.connect()
                exchange = _Exchange(connection, sink)
                try:
                    status = await exchange.run(message)
                    break
                except ConnectionGone as e:
                    # The server gave up a connection that was idle for long, just when it was wanted: no failure.
                    if not e.untouched or kept is None or kept.idle_seconds <= RESEND_IDLE_SECONDS:
                        raise
        except ClientError as e:
            raise RequestError(str(e)) from e
        self._pool.give_back(connection)
        if status != 200:
            raise RequestError(f"HTTP {status}: {exchange.error[:MAX_ERROR_CHARS].decode(errors='replace')}")


def _parse(path: str, body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as e:
        raise RequestError(f"{path} did not answer JSON: {e}") from e
