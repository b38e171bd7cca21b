"""HTTP connections with limits, for the ports of clients. The time of an answer has no limit.

uvicorn's httptools protocol bounds neither a head nor the time that a request takes to arrive. States of a connection:

    HEAD ──head complete──▶ BODY ──request complete──▶ IDLE ──first byte of the next──▶ HEAD
      │ HEAD_SECONDS          │ less than MIN_BODY_BYTES in BODY_SECONDS
      └──────── dropped ◀─────┘      unless an answer is under way: an answer is never cut by these limits

IDLE covers the wait for an answer, the answer itself, and then uvicorn's own limit on idle connections. A head or
trailers that are too long end the connection, and so do too many requests queued after a running one. If no answer is
under way, the client gets a 431.

A client that accepts nothing of its answer for ``send_seconds`` is disconnected (``SendLimit``), whatever kind of
answer it is. Its request ends as if the client had closed the connection.

``connections.py`` limits the number of connections that wait for a complete head, and the bytes of their heads.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from typing import cast

import httptools
import orjson
from starlette.types import ASGIApp
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .connections import Connections, network_of
from .errors import error_body
from .http_versions import for_version, head_without_upgrade
from .sending import SendLimit, limit_socket

HEAD_SECONDS = 10.0
"""Maximum seconds from a connection's start, or from a request's first byte, to the end of its head."""
BODY_SECONDS = 30.0
MIN_BODY_BYTES = 1024
"""Minimum bytes of an incomplete body in each ``BODY_SECONDS``."""
MAX_HEAD_BYTES = 64 << 10
"""Maximum bytes of a request's line, headers and trailers. Chunked framing between two pieces of a body counts as well.
"""
MAX_HEADERS = 128
MAX_QUEUED = 16
"""Maximum requests that one connection may send after the one that is being answered."""
MAX_QUEUED_BYTES = 1 << 20
"""Maximum bytes of the body of a queued request, which is not read yet."""
SEND_SECONDS = 60.0
HTTP_2_PREFACE = b"PRI * HTTP/2.0"
"""First bytes from a client that assumes HTTP/2."""


def limited_protocol(send_seconds: float, connections: Connections) -> type[LimitedProtocol]:
    """Make uvicorn's protocol class for one server. All its connections are counted in ``connections``.

    ``send_seconds``: time after which a client that accepts nothing of its answer is disconnected.
    """

    class LimitedServerProtocol(LimitedProtocol):
        _send_seconds = send_seconds
        _connections = connections

    return LimitedServerProtocol


def _last_words(status: int, reason: str, message: str) -> bytes:
    """Make the bytes of a whole HTTP response with an error, which announces that the connection is closed."""
    body = orjson.dumps(error_body(status, message))
    head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


HEAD_TOO_LONG = _last_words(
    431, "Request Header Fields Too Large", "the request's line and headers, or its trailers, are too long or too many"
)
NO_PLACE = _last_words(
    503, "Service Unavailable", "too many connections wait here for a request; send it again on a new connection"
)
TOO_SLOW = _last_words(
    408, "Request Timeout", f"the body came too slowly: less than {MIN_BODY_BYTES} bytes in {BODY_SECONDS:.0f} s"
)


def _bad_request(error: httptools.HttpParserError, data: bytes) -> bytes:
    """Make the response to ``data``, in which the parser found ``error``."""
    if isinstance(error.__context__, NotServed):
        text = str(error.__context__)
    elif data.startswith(HTTP_2_PREFACE):
        text = "this port speaks HTTP/1.1, not HTTP/2"
    else:
        text = f"this is not HTTP/1.1: {error}"
    return _last_words(400, "Bad Request", text)


class TooMuch(Exception):
    """A client exceeded a limit; ends its connection. httptools turns it into its own error."""


class NotServed(Exception):
    """A client asks for what only a proxy does; ends its connection as ``TooMuch`` does."""


class ConnectionPhase(Enum):
    """What a connection is waiting for from its client."""

    HEAD = auto()
    BODY = auto()
    IDLE = auto()


class LimitedProtocol(HttpToolsProtocol):
    """httptools rather than h11 for its speed: these connections carry the streams.

    ``_connections``: those of the server. ``network``: the client's, see ``network_of``.
    """

    _send_seconds = SEND_SECONDS
    _connections: Connections
    network = ""
    _send_limit: SendLimit | None = None
    _phase = ConnectionPhase.IDLE
    _limit: asyncio.TimerHandle | None = None
    _over = False
    _framing_bytes = 0
    """Read since the parser last made anything of it: an endless header reaches no callback."""
    _head_bytes = 0
    _header_count = 0
    _body_bytes = 0
    _running: RequestResponseCycle | None = None
    """The request that was started last. ``cycle`` is the one that was read last: others may be queued between them."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limit_socket(transport, self._send_seconds)
        self._send_limit = SendLimit(transport, self.loop, self._send_seconds)
        self._enter(ConnectionPhase.HEAD)
        self._watch()
        self.network = network_of(self.client[0] if self.client else "")
        self._connections.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._enter(ConnectionPhase.IDLE)
        self._connections.closed(self)
        if self._send_limit is not None:
            self._send_limit.stop()
        if self._running is not None:
            # uvicorn tells only the request that was read last.
            self._running.disconnected = self._running.disconnected or not self._running.response_complete
            self._running.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_sending()
        if not self._answering and not self.transport.is_closing():
            # Also if a body goes on after its answer: a connection that needs no key may not hold a place by that.
            self._connections.wait(self)
            if self._phase is ConnectionPhase.HEAD:
                self._connections.hold(self, self._framing_bytes + self._head_bytes)

    def end(self) -> None:
        """Close the connection, which waits for a request, and free its descriptor at once.

        A head that has not arrived in full is answered with a 503 if the kernel takes that now. What the client has
        not taken of an earlier answer is lost: the descriptor would be held for it until ``send_seconds`` are over.
        """
        if self.transport.get_write_buffer_size() and self._send_limit is not None:
            self._send_limit.reset()
            return
        if self._phase is ConnectionPhase.HEAD and not self.transport.is_closing():
            # uvloop writes at the end of its turn, or now if more waits than this limit.
            self.transport.set_write_buffer_limits(high=0)
            self.transport.write(NO_PLACE)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._phase is ConnectionPhase.IDLE:
            self._enter(ConnectionPhase.HEAD)
        self._framing_bytes += len(data)
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._phase is ConnectionPhase.HEAD:
            self._connections.hold(self, len(data))
        if self._framing_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()
        self._watch()

    def _feed(self, data: bytes) -> None:
        """Parse ``data``.

        A request to upgrade to another protocol is served as plain HTTP/1, because no other is spoken here. Java's
        HttpClient asks with every first request; httptools would skip the body.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._refuse(HEAD_TOO_LONG if self._over else _bad_request(error, data))
        except httptools.HttpParserUpgrade as upgrade:
            head = head_without_upgrade(self.parser.get_method(), self.url, self.scope["http_version"], self.headers)
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            # Each pass takes a request off the data, and the queue of requests has a limit.
            self._feed(head + data[upgrade.args[0] :])

    def on_message_begin(self) -> None:
        self._head_bytes = self._header_count = 0
        self._enter(ConnectionPhase.HEAD)
        if len(self.pipeline) >= MAX_QUEUED:
            self._exceed()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        self._count_head(len(name) + len(value))
        # A trailer is no header: it comes when the request is served already.
        if self._phase is ConnectionPhase.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._framing_bytes = 0
        self._connections.serve(self)
        self._enter(ConnectionPhase.BODY)
        if self.parser.get_method() == b"CONNECT":
            # To the parser, what follows belongs to a tunnel.
            raise NotServed("CONNECT asks for a proxy, and this is none")
        if self.parser.should_upgrade():
            # The parser stops here, and skips the body: see _feed.
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)
        if self.pipeline and len(self.cycle.body) > MAX_QUEUED_BYTES:
            self._exceed()

    def on_message_complete(self) -> None:
        self._framing_bytes = 0
        if self.parser.should_upgrade():
            return
        self._enter(ConnectionPhase.IDLE)
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        # Of a request that was queued the parser has forgotten what its connection header said.
        asks_to_keep = cycle is self.cycle and self.parser.should_keep_alive()
        complete = for_version(cast(ASGIApp, app), cycle, asks_to_keep=asks_to_keep)
        super()._start_asgi_task(cycle, cast(ASGI3Application, complete))

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES or self._header_count > MAX_HEADERS:
            self._exceed()

    def _exceed(self) -> None:
        self._over = True
        raise TooMuch

    def _refuse(self, last_words: bytes = HEAD_TOO_LONG) -> None:
        """Send ``last_words``, a whole error response, and close the connection.

        The connection is aborted without them if they would end up in an answer, or before an earlier request's answer.
        """
        if self._answering:
            if self._phase is not ConnectionPhase.BODY or self.pipeline or self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(last_words)
        self._watch_sending()
        self.transport.close()

    def _watch_sending(self) -> None:
        if self._send_limit is not None:
            self._send_limit.start()

    def _enter(self, phase: ConnectionPhase) -> None:
        self._phase = phase
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _watch(self) -> None:
        """Start the time limit of the present phase, if it has one and none runs.

        It is called after each read, because most requests come in one read and need no timer.
        """
        if self._limit is None and self._phase is not ConnectionPhase.IDLE and not self.transport.is_closing():
            self._body_bytes = 0
            seconds = HEAD_SECONDS if self._phase is ConnectionPhase.HEAD else BODY_SECONDS
            self._limit = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._limit = None
        # The client isn't the slow one while we don't read. Stray bytes behind a request that is being answered don't
        # count against it either.
        begun = self._answering and (self._phase is ConnectionPhase.HEAD or self.cycle.response_started)
        if (
            begun
            or self.flow.read_paused
            or (self._phase is ConnectionPhase.BODY and self._body_bytes >= MIN_BODY_BYTES)
        ):
            self._watch()
        elif self._phase is ConnectionPhase.BODY and not self.transport.is_closing():
            self._refuse(TOO_SLOW)
        elif not self.transport.is_closing():
            self.transport.abort()
