"""Hands values from helper threads to a polled loop."""

from __future__ import annotations

import os
import queue
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """``put`` from any thread; the loop polls ``fileno`` and calls ``take_all``."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable while there may be something to take."""
        return self._event

    def put(self, value: T) -> None:
        """Add a value and wake the loop."""
        self._queue.put(value)
        os.eventfd_write(self._event, 1)

    def take_all(self) -> list[T]:
        """Everything that was put since the last call."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        values = []
        while not self._queue.empty():
            values.append(self._queue.get())
        return values
