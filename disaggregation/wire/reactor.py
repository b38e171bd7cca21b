"""Waits for sockets, and for other threads that want attention."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from typing import Any


class Reactor:
    """A selector with a doorbell. One thread uses it; ``wake`` is for the others.

    It can itself be waited for, as one descriptor: readable, level-triggered, while anything in it is ready.
    """

    def __init__(self) -> None:
        self._selector = selectors.EpollSelector()
        self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._doorbell, selectors.EVENT_READ)

    def watch(self, sock: socket.socket | int, data: object, *, read: bool, write: bool) -> None:
        """Have ``wait`` return ``data`` when a socket or other descriptor can be read or written.

        For one that is watched already, only ``read`` and ``write`` are changed.
        """
        mask = (selectors.EVENT_READ if read else 0) | (selectors.EVENT_WRITE if write else 0)
        key = self._selector.get_map().get(sock)
        if key is None:
            self._selector.register(sock, mask, data)
        elif key.events != mask:
            self._selector.modify(sock, mask, data)

    def forget(self, sock: socket.socket | int) -> None:
        """Watch a descriptor no more; call this before closing it. Do nothing if it isn't watched."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(sock)

    def wait(self, timeout: float | None) -> list[tuple[Any, bool, bool]]:
        """Wait for I/O and return (data, readable, writable) of each descriptor that is ready.

        Wait at most ``timeout`` seconds (None: for ever). A call of ``wake`` ends the wait, too.
        """
        ready = []
        for key, mask in self._selector.select(timeout):
            if key.fd == self._doorbell:
                os.eventfd_read(self._doorbell)
            else:
                ready.append((key.data, bool(mask & selectors.EVENT_READ), bool(mask & selectors.EVENT_WRITE)))
        return ready

    def fileno(self) -> int:
        """Return a descriptor that is readable while a watched one is ready, for another poller."""
        return self._selector.fileno()

    def wake(self) -> None:
        """Make ``wait`` return. Thread-safe, and harmless after ``close``."""
        if self._doorbell >= 0:
            os.eventfd_write(self._doorbell, 1)

    def close(self) -> None:
        """Close the reactor's own descriptors. Watched sockets stay open."""
        self._selector.close()
        os.close(self._doorbell)
        self._doorbell = -1
