"""Connections to one server: as many as there are requests at a time, kept for the next ones."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

from .connection import Connection
from .errors import CannotConnect

KEEP_SECONDS = 4.0
"""Seconds that an unused connection is kept.

They are far fewer than an instance's ``--keep-alive-timeout`` (75 s), so a request rarely meets a connection that is
just being closed. If it does, it is sent again.
"""

C = TypeVar("C", bound=Connection)
SocketOptions = Sequence[tuple[int, int, int]]


class Origin(NamedTuple):
    """Where a server is."""

    host: str
    port: int
    tls: bool

    @staticmethod
    def of(url: str) -> Origin:
        """Return the server of an ``http://`` or ``https://`` URL with a host."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        return Origin(parts.hostname or "", parts.port or (443 if tls else 80), tls)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class IdleConnection(NamedTuple, Generic[C]):
    """A kept connection, and for how many seconds it was idle."""

    connection: C
    idle_seconds: float


class ConnectionPool(Generic[C]):
    """Takes and gives connections to one server. ``make`` makes a new one; ``connect_seconds``: how long that may take.

    ``tls``: settings for an ``https`` server. None: the pool makes its own, which takes 65 ms.

    Of those that are kept, the one used last is taken first, so that what a burst has left over gets old and is closed.
    """

    def __init__(
        self,
        origin: Origin,
        make: Callable[[], C],
        connect_seconds: float,
        socket_options: SocketOptions = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._origin = origin
        self._make = make
        self._connect_seconds = connect_seconds
        self._socket_options = socket_options
        self._tls = (tls or ssl.create_default_context()) if origin.tls else None
        self._idle: deque[tuple[float, C]] = deque()
        self._expiry: asyncio.TimerHandle | None = None

    def take_kept(self) -> IdleConnection[C] | None:
        """Take out the kept connection that was used last; None if none is still open."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            since, connection = self._idle.pop()
            if connection.usable:
                return IdleConnection(connection, now - since)
        return None

    def put_back(self, kept: IdleConnection[C]) -> None:
        """Put back a connection that ``take_kept`` returned and that was not used. Its idle time goes on."""
        self._idle.append((asyncio.get_running_loop().time() - kept.idle_seconds, kept.connection))

    async def connect(self) -> C:
        """Open a new connection within the pool's time limit; raises ``CannotConnect``."""
        loop = asyncio.get_running_loop()
        host, port, _ = self._origin
        try:
            async with asyncio.timeout(self._connect_seconds):
                transport, connection = await loop.create_connection(self._make, host, port, ssl=self._tls)
        except TimeoutError:
            raise CannotConnect(f"no connection to {self._origin} within {self._connect_seconds:g} s") from None
        except (OSError, UnicodeError) as e:  # UnicodeError: the host is no name that could be looked up
            raise CannotConnect(f"no connection to {self._origin}: {e}") from e
        for option in self._socket_options:
            transport.get_extra_info("socket").setsockopt(*option)
        return connection

    def give_back(self, connection: C) -> None:
        """Keep a connection after a complete answer, for ``KEEP_SECONDS``, unless it cannot be used again."""
        if not connection.usable:
            return
        loop = asyncio.get_running_loop()
        self._idle.append((loop.time(), connection))
        if self._expiry is None:
            self._expiry = loop.call_later(KEEP_SECONDS, self._expire)

    def close(self) -> None:
        """Close the kept connections. Those in use are not closed."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        while self._idle:
            self._idle.pop()[1].close()

    def _expire(self) -> None:
        """Close connections that were unused for too long, with one timer for all."""
        loop = asyncio.get_running_loop()
        self._expiry = None
        while self._idle:
            since, connection = self._idle[0]
            left = since + KEEP_SECONDS - loop.time()
            if left > 0 and connection.usable:
                self._expiry = loop.call_later(left, self._expire)
                return
            self._idle.popleft()
            connection.close()
