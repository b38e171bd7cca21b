"""One end of a control connection.

    GREETING (ours is sent, the peer's is awaited) → OPEN (frames) → CLOSED by its owner, on ``LinkLost`` or at will

Nothing here blocks. An announced frame gets memory only as it arrives: at most twice the bytes received so far.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import NamedTuple

from ...errors import LinkLost, ProtocolBroken
from ...wire.reactor import Reactor
from ...wire.stream import MAX_TURN, Stream
from .connection_cipher import Cipher
from .frames import GREETING, KEY_BYTES, LENGTH, wrong_greeting

FIRST_PIECE = 4096
LONGEST_PIECE = 1 << 20
UNREAD_AT_CLOSE = 64 << 10


class ReadResult(NamedTuple):
    """Result of one read: a whole frame or None, and the number of bytes read."""

    frame: bytes | None
    nbytes: int


class ControlConnection:
    """A non-blocking connection that ``reactor`` watches and reports. Raises ``OSError`` if the socket was reset.

    ``frame_limit``: maximum size of a frame from the peer. ``send_limit``: send-buffer limit. Both are in bytes.
    """

    def __init__(
        self, sock: socket.socket, reactor: Reactor, cipher: Cipher, frame_limit: int, send_limit: int
    ) -> None:
        self.stream = Stream(sock)
        self.cipher = cipher
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
        self._queue(cipher.greeting)
        reactor.watch(sock, self, read=True, write=True)

    @property
    def held(self) -> int:
        """Memory of the frame that is being received, in bytes."""
        return sum(map(len, self._pieces))

    def read(self, budget: int = MAX_TURN) -> ReadResult:
        """Read what has arrived: at most one frame and about ``budget`` bytes. It never blocks.

        Raises ``LinkLost`` when the connection has ended, and ``ProtocolBroken`` for an invalid greeting or frame.
        """
        try:
            nbytes = self.stream.on_readable(budget)
        except ProtocolBroken:
            raise
        except LinkLost as e:
            # The system reports the reason once. If a write got it, a read sees only the end.
            raise self._write_broken or e from None
        self.flush()
        frame, self._frame = self._frame, None
        return ReadResult(frame, nbytes)

    def send(self, frames: Sequence[bytes]) -> None:
        """Queue frames, and send what the kernel accepts now.

        They wait until both ends have greeted. Raises ``ProtocolBroken`` if more than ``send_limit`` bytes wait,
        because the peer does not read.
        """
        self._waiting += frames
        self._seal()
        self.flush()
        if self.unsent > self.send_limit:
            raise ProtocolBroken(f"it does not read what it is sent: {self.unsent} bytes wait for it")

    def flush(self) -> None:
        """Send as much of the queue as the kernel accepts. A broken connection is only reported by ``read``."""
        if not self.unsent and not self._write_watched:
            return
        try:
            self.unsent -= self.stream.on_writable()
        except LinkLost as e:
            # This is not the end yet: earlier data of the peer must still be read. The read after it meets the end.
            self._write_broken = e
            self.unsent = 0
        if bool(self.unsent) != self._write_watched:
            self._write_watched = bool(self.unsent)
            self._reactor.watch(self.stream.sock, self, read=True, write=self._write_watched)

    def close(self) -> None:
        """Close at once. The kernel still sends what it has accepted."""
        self.flush()
        self.closed = True
        self._reactor.forget(self.stream.sock)
        with contextlib.suppress(OSError):
            self.stream.sock.shutdown(socket.SHUT_WR)
            # A socket that is closed with unread data sends a reset, which can overtake data sent before it.
            self.stream.sock.recv(UNREAD_AT_CLOSE)
        self.stream.close()
        self._pieces.clear()

    def _seal(self) -> None:
        """Seal the waiting frames and queue them for sending. Do nothing while the cipher has no key."""
        if not self.cipher.ready:
            return
        for frame in self._waiting:
            sealed = self.cipher.seal(frame)
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
        self.cipher.greeted(bytes(self._greeting + self._key))
        self.greeted = True
        self._seal()
        self._read_prefix()

    def _read_prefix(self) -> None:
        self.stream.read([memoryview(self._prefix)], self._on_prefix)

    def _on_prefix(self) -> None:
        (length,) = LENGTH.unpack(self._prefix)
        limit = self.frame_limit + self.cipher.overhead
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
        self._frame = self.cipher.open(b"".join(self._pieces))
        self._pieces.clear()
        self._seal()
        self._read_prefix()
        self.stream.pause()
