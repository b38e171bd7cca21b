"""A listener of the attacker's. No process of the cluster may ever connect to it."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

HOSTS = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}
READ_BYTES = 2000
"""Bytes that are read of a connection, for the report."""
MAX_LINES = 6
"""Maximum lines of a report. A member that was added is asked every second."""


class Bait:
    """Listens at one port of both loopback addresses, and records connections. ``port``: the port."""

    def __init__(self, stack: ExitStack) -> None:
        self.port = 0
        self._socks: list[socket.socket] = []
        for host, family in HOSTS.items():
            # A host without IPv6 has one address to listen at.
            with suppress(OSError):
                sock = stack.enter_context(socket.create_server((host, self.port), family=family))
                self.port = sock.getsockname()[1]
                self._socks.append(sock)
        self._connections: deque[str] = deque()
        self._threads = [threading.Thread(target=self._accept, args=(sock,), name="bait") for sock in self._socks]

    def start(self) -> None:
        """Begin to accept connections."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads."""
        for sock in self._socks:
            sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def taken(self) -> list[str]:
        """Return lines about the connections since the last call."""
        taken: list[str] = []
        with suppress(IndexError):
            while True:
                taken.append(self._connections.popleft())
        return taken[:MAX_LINES]

    def _accept(self, sock: socket.socket) -> None:
        while True:
            try:
                connection, address = sock.accept()
            except OSError:
                return  # it is shut down
            with connection, suppress(OSError):
                self._connections.append(f"the attacker's listener got a connection from {address}")
                connection.settimeout(1)
                self._connections.append(f"the attacker's listener was sent {connection.recv(READ_BYTES)!r}")


@contextmanager
def bait() -> Iterator[Bait]:
    """Listen for the duration of the block."""
    with ExitStack() as stack:
        found = Bait(stack)
        found.start()
        try:
            yield found
        finally:
            found.stop()
