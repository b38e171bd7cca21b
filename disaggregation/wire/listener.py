"""A listening socket that survives every error of ``accept``."""

from __future__ import annotations

import socket
import time

from ...runtime.refusal_log import RefusalLog
from .reactor import Reactor

BACKLOG = 128
ACCEPT_PAUSE_SECONDS = 0.2
"""How long the listener pauses when the system has no descriptor or memory for another connection. Those that wait for
it stay in its backlog; watched meanwhile, it would be ready all the time and take a whole core."""


class Listener:
    """``sock`` listens already. The reactor reports this object when a connection waits.

    LISTENING → (no descriptors) → PAUSED until ``listen_again`` → LISTENING; ``close`` from either.
    """

    def __init__(self, sock: socket.socket, reactor: Reactor, refusals: RefusalLog) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.listen_again: float | None = None
        self._reactor = reactor
        self._refusals = refusals
        reactor.watch(sock, self, read=True, write=False)

    def accept(self) -> socket.socket | None:
        """Accept the next connection; return None if there is none.

        If the system has no descriptors, return None and pause listening for ``ACCEPT_PAUSE_SECONDS``.
        """
        if self.listen_again is not None:
            return None
        try:
            return self.sock.accept()[0]
        except (BlockingIOError, ConnectionAbortedError):
            return None
        except OSError as e:
            # EMFILE, ENFILE, ENOBUFS, ENOMEM, or what a network reports here: none of it ends this process.
            self._refusals.add(f"can't accept a connection: {e.strerror}; trying again in {ACCEPT_PAUSE_SECONDS:g} s")
            self._reactor.forget(self.sock)
            self.listen_again = time.monotonic() + ACCEPT_PAUSE_SECONDS
            return None

    def check(self, now: float) -> None:
        """Listen again if a pause for lack of descriptors is over at ``now``."""
        if self.listen_again is not None and self.listen_again <= now:
            self.listen_again = None
            self._reactor.watch(self.sock, self, read=True, write=False)

    def close(self) -> None:
        """Close the listening socket."""
        if self.listen_again is None:
            self._reactor.forget(self.sock)
        self.sock.close()
