"""Hands values from helper threads to a polled loop."""

from __future__ import annotations

import os
import queue
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Queue of values from any thread (``put``) to a loop that polls ``fileno`` and calls ``take_all``."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return a descriptor that is readable while there may be values to take."""
        return self._event

    def put(self, value: T) -> None:
        """Add a value, from any thread, and wake the loop that polls ``fileno``."""
        self._queue.put(value)
        os.eventfd_write(self._event, 1)

    def take_all(self) -> list[T]:
        """Remove and return all values that were put since the last call; never wait."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        values = []
        while not self._queue.empty():
            values.append(self._queue.get())
        return values
