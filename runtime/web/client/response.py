"""A server's answer as a task reads it.

    asked ──head()──▶ begun ──read() … b""──▶ ended      (anything may raise ``ClientError`` instead)
      └────────────────┴── close() ──▶ dropped: the connection is closed, which tells the server

What arrives wakes the reading task once, however much it is, and lies in a buffer until that has time for it. When the
buffer is full, no more is read from the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .connection import Connection, Headers
from .errors import AnswerTooLong, ClientError

MAX_BUFFERED = 64 << 10
"""Bytes of the body that wait to be read, above which nothing more is taken from the server. One read of the socket,
256 KiB at most, may come on top."""
CATCH_UP_SECONDS = 0.002
"""Time without data after which a reader that was behind has caught up.

It is longer than a round trip, because what the server's kernel holds comes within one.
"""

TURNS = 2
"""Turns of the loop in which it certainly looks at its sockets.

asyncio's does so in the first one. In uvloop's, that may be what is left of a turn: timers, callbacks, then sockets.
"""


class ClientResponse:
    """The answer to one request. ``status`` and ``headers`` are there once it has begun.

    ``silence``: seconds that the server may say nothing while ``read`` waits; None: any time. ``give_back`` takes the
    connection when the answer is complete.
    """

    def __init__(self, connection: Connection, give_back: Callable[[], None], silence: float | None) -> None:
        self.status = 0
        self.headers: Headers = []
        self._connection = connection
        self._give_back = give_back
        self._silence = silence
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._paused_at: float | None = None
        self._longest_pause = 0.0
        self._ended = False
        self._error: ClientError | None = None
        self._on_complete: Callable[[], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._waiting_since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of a header, None if it is missing. ``name`` is in lower case."""
        return next((value for key, value in self.headers if key == name), None)

    @property
    def longest_pause(self) -> float:
        """Longest time for which nothing was read from the server, because the buffer was full, in seconds.

        It includes a pause that has not ended. To the server, it is a client that does not read. What comes after a
        pause may have waited in the kernels. Once ``read`` had to wait for the server, that was all read, and earlier
        pauses no longer count.
        """
        if self._paused_at is None:
            return self._longest_pause
        return max(self._longest_pause, asyncio.get_running_loop().time() - self._paused_at)

    # the connection's side, see ResponseReceiver

    def take_head(self, status: int, headers: Headers) -> None:
        """Keep status and headers, and wake the reading task."""
        self.status, self.headers = status, headers
        self._wake()

    def take_body(self, data: bytes) -> None:
        """Buffer a piece of the body. Pauses the connection while more than ``MAX_BUFFERED`` bytes are unread."""
        self._pieces.append(data)
        self._buffered += len(data)
        if self._buffered > MAX_BUFFERED:
            self._connection.pause()
            if self._paused_at is None:
                self._paused_at = asyncio.get_running_loop().time()
        self._wake()

    def take_end(self, error: ClientError | None) -> None:
        """End the answer. Without an error, the connection is returned for the next request."""
        self._end(error)
        if error is None:
            self._give_back()
            if self._on_complete is not None:
                self._on_complete()
        self._wake()

    # the reader's side

    def when_complete(self, call: Callable[[], None]) -> None:
        """Call ``call`` once the server has sent the whole answer, even if it is not read yet: at once if it has.

        It is not called if the answer breaks off, or is dropped before its end has arrived.
        """
        self._on_complete = call
        if self._ended and self._error is None:
            call()

    async def head(self) -> None:
        """Wait until the answer begins, and its ``status`` and ``headers`` are set; raises ``ClientError``."""
        while not self.status and not self._ended:
            await self._next_change()
        if not self.status and self._error:
            raise self._error

    async def read(self) -> bytes:
        """Return the part of the body that has arrived since the last call, or wait for more; b"" at its end.

        If the body breaks off, ``ClientError`` is raised after all that arrived was read. ``TimeoutError`` is raised
        if the server is silent for too long.
        """
        while not self._pieces:
            if self._ended:
                if self._error:
                    raise self._error
                return b""
            waiter = self._next_change()
            if self._longest_pause:
                asyncio.get_running_loop().call_later(CATCH_UP_SECONDS, self._catch_up, waiter, TURNS)
            await waiter
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self._buffered > MAX_BUFFERED:
            self._longest_pause, self._paused_at = self.longest_pause, None
            self._connection.resume()
        self._buffered = 0
        return data

    async def read_all(self, limit: int | None = None) -> bytes:
        """Read the rest of the body. Raises ``AnswerTooLong`` above ``limit`` bytes; None: no limit.

        Raises ``ClientError`` if the body breaks off, and ``TimeoutError`` if the server is silent for too long.
        """
        parts, size = list[bytes](), 0
        while data := await self.read():
            parts.append(data)
            size += len(data)
            if limit is not None and size > limit:
                raise AnswerTooLong(f"more than {limit} bytes")
        return b"".join(parts)

    def close(self) -> None:
        """Close the connection unless the answer is complete. Nothing more of it arrives then."""
        if not self._ended:
            self._end(ClientError("the answer was dropped"))
            self._connection.close()

    def _end(self, error: ClientError | None) -> None:
        self._ended = True
        self._error = error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _catch_up(self, waiter: asyncio.Future[None], turns: int) -> None:
        """Forget the pauses if the ``waiter`` of a read still waits ``turns`` turns of the loop later.

        This call may be late, and the socket may hold data that the loop has not seen.
        """
        if waiter.done():
            return
        if turns:
            asyncio.get_running_loop().call_soon(self._catch_up, waiter, turns - 1)
            return
        self._longest_pause = 0.0

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _next_change(self) -> asyncio.Future[None]:
        """Return a future that is done when something arrives, or raises ``TimeoutError`` after ``silence`` seconds.

        One timer serves the whole body, and is moved only when it fires. A timer for each wait would cost more than
        everything else.
        """
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        if self._silence is not None and self.status:
            self._waiting_since = loop.time()
            if self._timer is None:
                self._timer = loop.call_later(self._silence, self._check_silence, self._silence)
        return waiter

    def _check_silence(self, limit: float) -> None:
        waiter, loop = self._waiter, asyncio.get_running_loop()
        left = limit
        if waiter is not None and not waiter.done():
            left = self._waiting_since + limit - loop.time()
            if left <= 0:
                self._timer = None
                waiter.set_exception(TimeoutError())
                return
        self._timer = loop.call_later(left, self._check_silence, limit)
