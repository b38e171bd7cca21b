"""A non-blocking socket that fills given memory and drains given memory, without a copy of its own."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from ..errors import LinkLost

MAX_VIEWS = 64
"""Pieces offered to a system call at once: more than it takes are listed in vain."""
MAX_TURN = 4 << 20
"""Bytes moved before the other sockets get their turn."""


class Stream:
    """Reads exactly what was asked for, then calls back; sends what was queued, in order.

    Nothing happens but in ``on_readable`` and ``on_writable``, which raise ``LinkLost`` once the connection is gone and
    return how many bytes they have moved.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.last_progress = time.monotonic()
        self.is_over = False
        """Whether nothing more comes: all that the other end has sent was read."""
        self._wanted: deque[memoryview] = deque()
        self._then: Callable[[], None] | None = None
        self._queued: deque[memoryview] = deque()
        self._paused = False

    @property
    def sending(self) -> bool:
        """Whether something is left to send."""
        return bool(self._queued)

    @property
    def queued(self) -> int:
        """Number of pieces that are queued and not sent."""
        return len(self._queued)

    def read(self, views: Iterable[memoryview], then: Callable[[], None]) -> None:
        """Have ``on_readable`` fill ``views``, one after another, and then call ``then``, which may ask for more.

        Return at once.
        """
        self._wanted.extend(views)
        self._then = then

    def send(self, views: Iterable[memoryview | bytes]) -> None:
        """Queue ``views`` for ``on_writable``; their memory must not change before they are sent."""
        if not self._queued:
            self.last_progress = time.monotonic()
        # Without empty ones: a send that was offered nothing else would look like one that the kernel did not take.
        self._queued.extend(memoryview(view) for view in views if len(view))

    def pause(self) -> None:
        """Make the present ``on_readable`` return. Further bytes stay in the kernel. To be called by the callback of
        ``read``.
        """
        self._paused = True

    def on_readable(self, budget: int = MAX_TURN) -> int:
        """Read the available bytes, at most ``budget``, into the memory asked for, and return how many were read.

        Raises ``LinkLost`` if the connection has ended, or for bytes that were not asked for.
        """
        left = budget
        self._paused = False
        while left > 0 and not self._paused:
            if not self._wanted:
                raise LinkLost("the peer sent what was not expected")
            try:
                received = self._receive(list(islice(self._wanted, MAX_VIEWS)))
            except BlockingIOError:
                break
            except OSError as e:
                self.is_over = True
                raise LinkLost(f"the connection broke: {e.strerror}") from e
            if received == 0:
                self.is_over = True
                raise LinkLost("the peer closed the connection")
            self.last_progress = time.monotonic()
            left -= received
            _advance(self._wanted, received)
            if not self._wanted and self._then is not None:
                then, self._then = self._then, None
                then()
        return budget - left

    def on_writable(self) -> int:
        """Send what the kernel accepts of the queue, at most ``MAX_TURN`` bytes, and return how many bytes were sent.

        Raises ``LinkLost`` if the connection is broken.
        """
        left = MAX_TURN
        while self._queued and left > 0:
            try:
                sent = self.sock.sendmsg(list(islice(self._queued, MAX_VIEWS)))
            except BlockingIOError:
                break
            except OSError as e:
                raise LinkLost(f"the connection broke: {e.strerror}") from e
            self.last_progress = time.monotonic()
            left -= sent
            _advance(self._queued, sent)
        return MAX_TURN - left

    def close(self) -> None:
        """Close the socket, and drop the references to all memory to be filled or sent."""
        self._wanted.clear()
        self._queued.clear()
        self._then = None
        self.sock.close()

    def _receive(self, views: list[memoryview]) -> int:
        return self.sock.recvmsg_into(views)[0]


def _advance(views: deque[memoryview], count: int) -> None:
    """Drop the first ``count`` bytes of ``views``, which were read or sent.

    The queue is changed in place, the memory is not.
    """
    while count:
        first = views[0]
        if len(first) > count:
            views[0] = first[count:]
            return
        count -= len(first)
        views.popleft()


def expect_end(stream: Stream) -> None:
    """Have the stream read until the connection ends. Any byte before that raises ``LinkLost`` in ``on_readable``."""

    def on_byte() -> None:
        raise LinkLost("the peer sent what was not expected")

    stream.read([memoryview(bytearray(1))], on_byte)
