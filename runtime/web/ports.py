"""Addresses to listen on."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

LOOPBACK = "127.0.0.1"


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """The listening socket of an HTTP front; raises ``OSError``, as for a port that is taken or a name that is none."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # asyncio sends at once (TCP_NODELAY) on connections of a socket that is TCP's by name; uvloop on all.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # Connections of the last life that are still closing don't keep the port; a living listener does.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock


def check_port_free(host: str, port: int) -> None:
    """Raise ``OSError`` where nobody could listen on this address now."""
    listen(host, port, 1).close()


def hold_free_port(host: str) -> socket.socket:
    """A socket that keeps a free port of ``host`` from being given to anybody until a process of ours listens there.

    It doesn't listen itself, so another socket with SO_REUSEADDR, as ``listen`` makes, may. Raises ``OSError``.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def http_url(host: str, port: int) -> str:
    """The URL of what listens there."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody listens on, held open together so that they differ.

    Another process may take one before it is used: whoever then can't listen on it says so and ends.
    """
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind((LOOPBACK, 0))
        return [sock.getsockname()[1] for sock in sockets]


def means_this_host(host: str) -> bool:
    """Whether connecting to ``host`` stays on this host, told without looking up a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def is_loopback(name: str) -> bool:
    """Whether this name or address can only mean the host itself."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
