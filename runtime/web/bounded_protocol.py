"""HTTP connections that strangers can't hold: for a port that anybody reaches and nobody stays at.

uvicorn itself limits neither how long a request may take to arrive nor how many connections wait for one; its limit on
concurrency refuses the newest, so that idle strangers would lock out everybody else.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 256
"""Open at once; one more ends the one that has been waiting longest for its request."""
REQUEST_SECONDS = 5.0
"""From a connection's start, or from its last answer, to the end of the next answer."""
MAX_HEAD_BYTES = 16 << 10


class BoundedProtocol(H11Protocol):
    """h11 rather than httptools, which bounds no header."""

    _limit: asyncio.TimerHandle | None = None
    waiting_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > MAX_CONNECTIONS:
            oldest = min((c for c in self.connections if isinstance(c, BoundedProtocol)), key=lambda c: c.waiting_since)
            oldest.end()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def end(self) -> None:
        """Drop the connection, whatever it was about to say."""
        if not self.transport.is_closing():
            self.transport.abort()

    def _wait(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self.waiting_since = self.loop.time()
        self._limit = self.loop.call_later(REQUEST_SECONDS, self.end)
