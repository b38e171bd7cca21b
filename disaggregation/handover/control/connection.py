"""One control connection, seen from either end.

    GREETING (ours is sent, the other's is awaited) → OPEN (frames) → CLOSED by its owner, on ``LinkLost`` or on its own

Nothing here waits, and nothing is believed before it is there: of a frame that was announced no more memory is taken
than twice what has come of it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import NamedTuple

from ...errors import LinkLost, ProtocolBroken
from ...wire.reactor import Reactor
from ...wire.stream import MAX_TURN, Stream
from .frames import GREETING, KEY_BYTES, LENGTH, wrong_greeting
from .session import Session

FIRST_PIECE = 4096
LONGEST_PIECE = 1 << 20
UNREAD_AT_CLOSE = 64 << 10


class Reading(NamedTuple):
    """What one look at the socket has brought: a whole frame or none, and bytes in any case."""

    frame: bytes | None
    nbytes: int


class ControlConnection:
    """Watched by ``reactor``, which reports this object. Raises ``OSError`` for a socket that was reset already.

    ``frame_limit``: bytes of a frame from the peer; ``send_limit``: bytes that may wait for the peer to read.
    """

    def __init__(
        self, sock: socket.socket, reactor: Reactor, session: Session, frame_limit: int, send_limit: int
    ) -> None:
        self.stream = Stream(sock)
        self.session = session
        self._waiting: list[bytes] = []
        self.frame_limit = frame_limit
        self.send_limit = send_limit
        self.greeted = False
        self.closed = False
        self._reactor = reactor
        self._write_watched = True
        self.unsent = 0
        self._write_broken: LinkLost | None = None
        self._greeting = bytearray(GREETING.size)
        self._key = bytearray(KEY_BYTES)
        self._prefix = bytearray(LENGTH.size)
        self._pieces: list[bytearray] = []
        self._received = 0
        self._left = 0
        self._frame: bytes | None = None
        self.stream.read([memoryview(self._greeting)], self._on_greeting)
        self._queue(session.greeting)
        reactor.watch(sock, self, read=True, write=True)

    @property
    def held(self) -> int:
        """Bytes that this connection's incomplete frame takes here."""
        return sum(map(len, self._pieces))

    def read(self, budget: int = MAX_TURN) -> Reading:
        """At most one frame and about ``budget`` bytes; raises ``LinkLost`` when the connection is over."""
        try:
            nbytes = self.stream.on_readable(budget)
        except ProtocolBroken:
            raise
        except LinkLost as e:
            # The system tells the reason once; where writing was told, reading only sees an end.
            raise self._write_broken or e from None
        self.flush()
        frame, self._frame = self._frame, None
        return Reading(frame, nbytes)

    def send(self, frames: Sequence[bytes]) -> None:
        """Send what the kernel takes and queue the rest; raises ``ProtocolBroken`` for a peer that does not read."""
        self._waiting += frames
        self._seal()
        self.flush()
        if self.unsent > self.send_limit:
            raise ProtocolBroken(f"it does not read what it is sent: {self.unsent} bytes wait for it")

    def flush(self) -> None:
        """Send what the kernel takes of what is queued."""
        if not self.unsent and not self._write_watched:
            return
        try:
            self.unsent -= self.stream.on_writable()
        except LinkLost as e:
            # Not the end yet: what the peer said before is still to be read, and reading then meets the end.
            self._write_broken = e
            self.unsent = 0
        if bool(self.unsent) != self._write_watched:
            self._write_watched = bool(self.unsent)
            self._reactor.watch(self.stream.sock, self, read=True, write=self._write_watched)

    def close(self) -> None:
        """Close at once; the kernel goes on sending what it has taken."""
        self.flush()
        self.closed = True
        self._reactor.forget(self.stream.sock)
        with contextlib.suppress(OSError):
            self.stream.sock.shutdown(socket.SHUT_WR)
            # Closed with something unread, a socket sends a reset, which can overtake what was sent before it.
            self.stream.sock.recv(UNREAD_AT_CLOSE)
        self.stream.close()
        self._pieces.clear()

    def _seal(self) -> None:
        """Queue the frames that wait, once it is known how to seal them."""
        if not self.session.ready:
            return
        for frame in self._waiting:
            sealed = self.session.seal(frame)
            self._queue(LENGTH.pack(len(sealed)), sealed)
        self._waiting.clear()

    def _queue(self, *views: bytes) -> None:
        if self._write_broken is None:
            self.stream.send(views)
            self.unsent += sum(map(len, views))

    def _on_greeting(self) -> None:
        problem = wrong_greeting(self._greeting)
        if problem is not None:
            raise ProtocolBroken(problem)
        self.stream.read([memoryview(self._key)], self._on_key)

    def _on_key(self) -> None:
        self.session.greeted(bytes(self._greeting + self._key))
        self.greeted = True
        self._seal()
        self._read_prefix()

    def _read_prefix(self) -> None:
        self.stream.read([memoryview(self._prefix)], self._on_prefix)

    def _on_prefix(self) -> None:
        (length,) = LENGTH.unpack(self._prefix)
        limit = self.frame_limit + self.session.overhead
        if not 0 < length <= limit:
            raise ProtocolBroken(f"it announced a frame of {length} bytes: 1 to {limit} are taken here")
        self._left, self._received = length, 0
        self._read_piece()

    def _read_piece(self) -> None:
        piece = bytearray(min(self._left, max(FIRST_PIECE, self._received), LONGEST_PIECE))
        self._pieces.append(piece)
        self.stream.read([memoryview(piece)], self._on_piece)

    def _on_piece(self) -> None:
        size = len(self._pieces[-1])
        self._received += size
        self._left -= size
        if self._left:
            self._read_piece()
            return
        self._frame = self.session.open(b"".join(self._pieces))
        self._pieces.clear()
        self._seal()
        self._read_prefix()
        self.stream.pause()
