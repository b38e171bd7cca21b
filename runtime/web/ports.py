"""Addresses to listen on."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

LOOPBACK = "127.0.0.1"


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """Open a TCP socket that listens on ``port`` of ``host`` (0: a free port).

    ``backlog``: maximum connections that wait to be accepted. Raises ``OSError`` if the port is taken or the name is
    unknown.
    """
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
    """Raise ``OSError`` if no process could listen on this address now."""
    listen(host, port, 1).close()


def hold_free_port(host: str) -> socket.socket:
    """Open a socket that keeps a free port of ``host`` reserved until a process of ours listens there.

    It does not listen itself, so another socket with SO_REUSEADDR, as ``listen`` makes, may. Raises ``OSError``.
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
    """Return the URL of a server at this address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def free_ports(count: int) -> list[int]:
    """Return free ports of the loopback address. They are held open together, so that they differ.

    Another process may take one before it is used. Then the process that cannot listen on it reports this and ends.
    """
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind((LOOPBACK, 0))
        return [sock.getsockname()[1] for sock in sockets]


def means_this_host(host: str) -> bool:
    """Return whether a connection to ``host`` stays on this host, without looking up a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def is_loopback(name: str) -> bool:
    """Return whether this name or address can only mean the host itself."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
