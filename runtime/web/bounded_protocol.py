"""HTTP connections that unknown clients cannot hold, for a public port with short requests.

uvicorn itself limits neither the time that a request may take to arrive, nor the number of connections that wait for
one. Its limit on concurrency refuses the newest connection, so idle clients would lock out all others.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 256
"""Open at once; one more ends the one that has been waiting longest for its request."""
BACKLOG = 64
"""Also how many connections asyncio accepts at a time, before any of those that have to go are gone."""
REQUEST_SECONDS = 5.0
"""From a connection's start, or from its last answer, to the end of the next answer."""
MAX_HEAD_BYTES = 16 << 10


def bounded_protocol() -> type[H11Protocol]:
    """Make uvicorn's protocol class for one server. All its connections are counted together."""
    waiting: dict[_Bounded, None] = {}

    class BoundedServerProtocol(_Bounded):
        _waiting = waiting

    return BoundedServerProtocol


class _Bounded(H11Protocol):
    """Protocol by h11, because httptools does not bound headers."""

    _waiting: dict[_Bounded, None]
    """All waiting connections of the server, the oldest first. A dropped one leaves it at once, before its transport
    has closed, so that it does not count any more.
    """
    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        while len(self._waiting) > MAX_CONNECTIONS:
            next(iter(self._waiting)).end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._wait()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, and close the connection. ``msg``: the body of the 400.

        If a request is running, it is ended. If its answer has begun, the connection is closed without a 400.
        """
        if self.cycle is not None:
            self.cycle.disconnected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # it was answered before its body had come
            self.transport.close()

    def end(self) -> None:
        """Abort the connection, and stop counting it. What it has still to send is lost."""
        self._forget()
        if not self.transport.is_closing():
            self.transport.abort()

    def _forget(self) -> None:
        self._waiting.pop(self, None)
        if self._limit is not None:
            self._limit.cancel()

    def _wait(self) -> None:
        self._forget()
        self._waiting[self] = None
        self._limit = self.loop.call_later(REQUEST_SECONDS, self.end)
