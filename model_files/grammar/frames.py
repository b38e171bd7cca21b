"""What the process that checks grammars is asked, and how: JSON lines on a stream socket.

Each line holds a ``Grammar``, and is answered by a line with a ``GrammarVerdict``. The first line that a process gets
holds its ``CheckLimits``.
"""

from __future__ import annotations

import socket
import time
from typing import TypeVar

import msgspec

from ...messages.grammar import Grammar
from ..text.rendering import BrokenStream

T = TypeVar("T", "CheckLimits", "GrammarVerdict", Grammar)
MAX_LINE_BYTES = 1 << 22


class CheckLimits(msgspec.Struct, frozen=True):
    """What the check of one grammar may take."""

    cpu_seconds: float = 0.5
    """CPU time of the process."""
    memory_bytes: int = 1 << 28
    """Address space beside that of the process at its start."""
    seconds: float = 60.0
    """Time until the process is given up; a busy machine may need it for a modest grammar."""


class GrammarVerdict(msgspec.Struct, frozen=True):
    """The result of a check."""

    error: str = ""
    """Why the grammar cannot be used; empty: it can."""


class Lines:
    """One end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unread = bytearray()

    def send(self, message: CheckLimits | GrammarVerdict | Grammar, deadline: float | None = None) -> None:
        """Send ``message``. Raises ``OSError``, and its subclass ``TimeoutError`` at ``deadline``.

        ``deadline``: time of the monotonic clock in seconds; None: wait without limit.
        """
        self._set_timeout(deadline)
        self._sock.sendall(msgspec.json.encode(message) + b"\n")

    def receive(self, kind: type[T], deadline: float | None = None) -> T:
        """Wait for a message and return it. Raises ``BrokenStream``, ``OSError``, or ``TimeoutError`` at ``deadline``.

        ``deadline``: time of the monotonic clock in seconds; None: wait without limit.
        """
        while (end := self._unread.find(b"\n")) < 0:
            self._set_timeout(deadline)
            part = self._sock.recv(1 << 16)
            if not part or len(self._unread) > MAX_LINE_BYTES:
                raise BrokenStream("the other end is closed" if not part else "a line is too long")
            self._unread += part
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as e:
            raise BrokenStream(f"no {kind.__name__}: {e}") from None

    def _set_timeout(self, deadline: float | None) -> None:
        self._sock.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))

    def close(self) -> None:
        """Close this end of the socket."""
        self._sock.close()
