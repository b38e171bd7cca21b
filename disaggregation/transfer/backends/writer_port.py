"""The socket at which writers connect to the pools of a backend."""

from __future__ import annotations

import socket
from collections.abc import Callable

from ....mem_cache.kv_pages.region import RegionError
from ....runtime.refusal_log import RefusalLog
from ...errors import LinkLost
from ...wire.listener import Listener
from ...wire.reactor import Reactor
from .handshake import Offer
from .link import IncomingLink


class WriterPort:
    """The listener of a backend. It listens nowhere until ``open``, and after ``close``."""

    def __init__(self, reactor: Reactor, refusals: RefusalLog) -> None:
        self._reactor = reactor
        self._refusals = refusals
        self.listener: Listener | None = None

    def open(self, listen: Callable[[], tuple[socket.socket, Offer]], host: str, port: int) -> Offer:
        """Listen for writers, and return the offer that tells them where.

        ``listen`` opens the listener; ``host`` and ``port`` are for the error message. Raises ``RegionError``.
        """
        try:
            sock, offer = listen()
        except OSError as e:
            place = f"{host}:{port}" if port else host
            raise RegionError(
                f"can't listen for KV transfers on {place}: {e.strerror}. Check --host and --disaggregation-data-port."
            ) from e
        self.listener = Listener(sock, self._reactor, self._refusals)
        return offer

    def accept(
        self, accepted: Callable[[socket.socket], IncomingLink], make_room: Callable[[], None]
    ) -> IncomingLink | None:
        """Accept the next connection and return its link, which is watched; None if there is none or it is refused.

        ``make_room`` is called before. ``accepted`` makes the link, and raises ``LinkLost`` or ``OSError`` to refuse
        it.
        """
        sock = self.listener.accept() if self.listener is not None else None
        if sock is None:
            return None
        make_room()
        try:
            link = accepted(sock)
            self._reactor.watch(sock, link, read=True, write=False)
        except (LinkLost, OSError) as e:  # a connection that was reset already can't be set up
            self._refusals.add(f"refused a connection: {e}")
            sock.close()
            return None
        return link

    @property
    def listen_again(self) -> float | None:
        """Time (``time.monotonic()``) at which to listen again after a lack of descriptors; None if it listens."""
        return self.listener.listen_again if self.listener is not None else None

    def check(self, now: float) -> None:
        """Listen again if the pause after a lack of descriptors is over at ``now``."""
        if self.listener is not None:
            self.listener.check(now)

    def close(self) -> None:
        """Close the listening socket; accepted connections stay."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None
