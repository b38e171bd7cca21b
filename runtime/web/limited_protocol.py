"""HTTP connections with limits on what arrives: for ports that clients use, where an answer takes as long as it takes.

uvicorn's httptools protocol bounds neither a head nor the time that a request takes to arrive. Of each connection:

    HEAD ──head complete──▶ BODY ──request complete──▶ IDLE ──first byte of the next──▶ HEAD
      │ HEAD_SECONDS          │ less than MIN_BODY_BYTES in BODY_SECONDS
      └──────── dropped ◀─────┘      unless an answer is under way: an answer is never cut by these limits

IDLE covers the wait for an answer, the answer itself, and then uvicorn's own limit on idle connections. A head or
trailers that are too long end the connection, as do too many requests queued behind a running one; where no answer is
under way, with a 431.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 10.0
"""From a connection's start, or from a request's first byte, to the end of its head."""
BODY_SECONDS = 30.0
MIN_BODY_BYTES = 1024
"""Of a body that is not complete, in each ``BODY_SECONDS``."""
MAX_HEAD_BYTES = 64 << 10
"""Of a request's line, headers and trailers. Chunked framing between two pieces of a body counts as a head does."""
MAX_HEADERS = 128
MAX_QUEUED = 16
"""Requests that one connection may send behind the one that is being answered."""
MAX_QUEUED_BYTES = 1 << 20
"""Of the body of a queued request, which nobody reads yet."""
HEAD_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class TooMuch(Exception):
    """A client exceeded a limit; ends its connection. httptools turns it into its own error."""


class Phase(Enum):
    """What a connection is waiting for from its client."""

    HEAD = auto()
    BODY = auto()
    IDLE = auto()


class LimitedProtocol(HttpToolsProtocol):
    """httptools rather than h11 for its speed: these connections carry the streams."""

    _phase = Phase.IDLE
    _limit: asyncio.TimerHandle | None = None
    _over = False
    _framing_bytes = 0
    """Read since the parser last made anything of it: an endless header reaches no callback."""
    _head_bytes = 0
    _header_count = 0
    _body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._enter(Phase.HEAD)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._enter(Phase.IDLE)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._phase is Phase.IDLE:
            self._enter(Phase.HEAD)
        self._framing_bytes += len(data)
        super().data_received(data)
        if self._framing_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()
        self._watch()

    def on_message_begin(self) -> None:
        self._head_bytes = self._header_count = 0
        self._enter(Phase.HEAD)
        if len(self.pipeline) >= MAX_QUEUED:
            self._exceed()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._framing_bytes = 0
        self._enter(Phase.BODY)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)
        if self.pipeline and len(self.cycle.body) > MAX_QUEUED_BYTES:
            self._exceed()

    def on_message_complete(self) -> None:
        self._framing_bytes = 0
        self._enter(Phase.IDLE)
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self._over:
            self._refuse()
        else:
            super().send_400_response(msg)

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

    def _refuse(self) -> None:
        """End the connection. A 431 in an answer, or before that of an earlier request, would be garbage."""
        if self._answering:
            self.transport.abort()
            return
        self.transport.write(HEAD_TOO_LONG)
        self.transport.close()

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _watch(self) -> None:
        """Start the time limit of the phase that a read ended in: most requests come in one read and need no timer."""
        if self._limit is None and self._phase is not Phase.IDLE and not self.transport.is_closing():
            self._body_bytes = 0
            seconds = HEAD_SECONDS if self._phase is Phase.HEAD else BODY_SECONDS
            self._limit = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._limit = None
        # The client isn't the slow one while we don't read. Stray bytes behind a request that is being answered don't
        # count against it either.
        begun = self._answering and (self._phase is Phase.HEAD or self.cycle.response_started)
        if begun or self.flow.read_paused or (self._phase is Phase.BODY and self._body_bytes >= MIN_BODY_BYTES):
            self._watch()
        elif not self.transport.is_closing():
            self.transport.abort()
