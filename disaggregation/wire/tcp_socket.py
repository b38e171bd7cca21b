"""TCP sockets as both planes want them: no waiting for more bytes, and no endless trust in a host that vanished."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

KEEPALIVE_IDLE_SECONDS = 5


def address_family(address: str) -> socket.AddressFamily:
    """Return the family of an IP address; raises ``ValueError`` for a name, because its look-up could block."""
    return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET


def tune(sock: socket.socket, silence: float) -> None:
    """Set TCP options: no delay, keep-alive, and a time limit of ``silence`` seconds for missing acknowledgements.

    After it, the peer's host counts as gone.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence * 1000))


def start_connecting(sock: socket.socket, address: str, port: int) -> None:
    """Make the socket non-blocking and start to connect it. Raises ``OSError`` for what fails at once."""
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        sock.connect((address, port))
