"""An HTTP/1.1 client made for measuring: callbacks from the socket to the recorder, no stream objects in between.

A general client runs a stack of coroutines for each chunk, which at a few thousand tokens a second takes a good part of
a core, on the machine that it measures, and delays its own time stamps. Here a chunk costs one parser call, and its
time is taken when the event loop hands over the bytes. docs/benchmarks.md has the figures.

A connection: connecting → idle → (waiting for the head → reading the body → idle)* → closed.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools
import orjson

from .errors import RequestError

CONNECT_TIMEOUT_SECONDS = 10.0
MAX_ERROR_CHARS = 300
Clock = Callable[[], float]


class BodySink(Protocol):
    """Takes the body of a 200 as it arrives."""

    def feed(self, data: bytes, at: float) -> None:
        """Bytes that came at ``at`` (of the client's clock)."""


class ConnectionGone(RequestError):
    """The server closed the connection before the answer was complete. ``untouched``: before it said anything."""

    def __init__(self, untouched: bool, reason: str) -> None:
        super().__init__(f"the server closed the connection {'before' if untouched else 'within'} the answer{reason}")
        self.untouched = untouched


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, clock: Clock) -> None:
        self.usable = False
        self._clock = clock
        self.text = bytearray()
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[int] | None = None
        self._begin_answer(None)

    def _begin_answer(self, sink: BodySink | None) -> None:
        self.text.clear()
        self._sink = sink
        self._status = 0
        self._framed = False
        self._untouched = True
        self._now = 0.0
        self._parser = httptools.HttpResponseParser(self)

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports have these methods without being subclasses.
        self._transport = cast(asyncio.Transport, transport)
        self.usable = True

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        self._untouched = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._finish(RequestError(f"not HTTP: {e}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._done is None or self._done.done():
            return
        if exc is None and self._status and not self._framed:
            # Neither a length nor chunks were announced: then the end of the connection is the body's.
            self._finish(None)
        else:
            self._finish(ConnectionGone(self._untouched, f": {exc}" if exc else ""))

    # the parser's side

    def on_header(self, name: bytes, value: bytes) -> None:
        self._framed |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._status == 200 and self._sink is not None:
            self._sink.feed(body, self._now)
        else:
            self.text += body

    def on_message_complete(self) -> None:
        self.usable = self.usable and self._parser.should_keep_alive()
        self._finish(None)

    # the client's side

    async def exchange(self, message: bytes, sink: BodySink | None) -> int:
        """Send one request, wait for the whole answer, return its status. ``text`` holds a body that no sink took."""
        assert self._transport is not None
        self._begin_answer(sink)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        try:
            return await self._done
        finally:
            # Cancelled in the middle of an answer: the rest of it must not reach the next request.
            if not self._done.done() or self._done.cancelled():
                self.close()

    def close(self) -> None:
        """Drop the connection."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def _finish(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
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
        assert url.hostname is not None
        self._host, self._path = url.hostname, url.path.rstrip("/")
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._tls else 80)
        authorization = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"host: {url.netloc.rpartition('@')[2]}\r\naccept: */*\r\n{authorization}"
        self._idle: list[_Connection] = []

    async def get_json(self, path: str) -> Any:
        """The JSON that GET ``path`` answers; raises ``RequestError``."""
        return _parse(path, await self._request(self._message("GET", path, b""), None))

    async def post(self, path: str, body: bytes = b"") -> bytes:
        """What POST ``path`` answers; raises ``RequestError``."""
        return await self._request(self._message("POST", path, body), None)

    async def post_stream(self, path: str, body: bytes, sink: BodySink) -> None:
        """POST ``body`` and feed the answer to ``sink``; raises ``RequestError`` when it is no 200 or breaks off."""
        await self._request(self._message("POST", path, body), sink)

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _message(self, method: str, path: str, body: bytes) -> bytes:
        content = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if method == "POST" else ""
        return f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}{content}\r\n".encode() + body

    async def _request(self, message: bytes, sink: BodySink | None) -> bytes:
        while True:
            connection, is_new = await self._connection()
            try:
                status = await connection.exchange(message, sink)
            except ConnectionGone as e:
                if e.untouched and not is_new:
                    # The server gave up a connection that was idle for long, just when it was wanted: no failure.
                    continue
                raise
            if connection.usable:
                self._idle.append(connection)
            else:
                connection.close()
            if status != 200:
                raise RequestError(f"HTTP {status}: {connection.text[:MAX_ERROR_CHARS].decode(errors='replace')}")
            return bytes(connection.text)

    async def _connection(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection, False
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self.clock), self._host, self._port, ssl=self._tls
                )
        except (OSError, TimeoutError) as e:
            raise RequestError(f"no connection to {self._host}:{self._port}: {e or 'timed out'}") from e
        return connection, True


def _parse(path: str, body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as e:
        raise RequestError(f"{path} did not answer JSON: {e}") from e
