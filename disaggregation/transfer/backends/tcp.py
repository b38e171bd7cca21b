"""KV pages over TCP: works between any two hosts, needs nothing.

``page_stream.py`` has the protocol of a connection. A peer that died is noticed by the connection's end. One that is
silent in the middle of a batch is noticed after ``stall_seconds``. An idle peer with a vanished host is noticed by TCP
keep-alive.
"""

from __future__ import annotations

import socket
from pathlib import Path

from ...wire import tcp_socket
from ...wire.stream import Stream
from . import tcp_address
from .base import Capabilities
from .handshake import Offer
from .link import IncomingLink, OutgoingLink
from .page_stream import StreamBackend, StreamWriter

BUFFER_BYTES = 4 << 20


class TcpBackend(StreamBackend):
    """Transfer backend that sends KV pages over TCP connections, between any two hosts.

    ``host`` is the address to listen on. Peers dial ``advertise_host`` if it is set, otherwise the listening address.
    """

    name = "tcp"
    can = Capabilities(checks_grants=True)

    def _listen(self) -> tuple[socket.socket, Offer]:
        # Buffers before connections exist: the window scale is fixed by the handshake.
        sock, place, port = tcp_address.listen(self.host, self.port, self.advertise_host, set_buffers)
        return sock, self._offer(place, port)

    def _dial(self, offer: Offer) -> OutgoingLink:
        sock = tcp_address.dial(offer, self._tune)
        return StreamWriter(Stream(sock), offer, self.groups, self.stall_seconds)

    def _unreachable(self, offer: Offer, reason: str) -> str:
        return tcp_address.unreachable(offer, reason)

    def _accepted(self, sock: socket.socket) -> IncomingLink:
        self._tune(sock)
        return self._reader(Stream(sock))

    def _tune(self, sock: socket.socket) -> None:
        set_buffers(sock)
        tcp_socket.tune(sock, self.stall_seconds)


def set_buffers(sock: socket.socket) -> None:
    """Set large send and receive buffers, each only if the system grants the whole size.

    A smaller buffer would be worse than none set: it switches off the kernel's own growing one.
    """
    for option, name in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        limit = Path("/proc/sys/net/core", name)
        if limit.exists() and int(limit.read_text()) >= BUFFER_BYTES:
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
