"""The connections of one HTTP server: their maximum number, and which ones end if there are too many.

    opened ──▶ waiting ──head complete──▶ serving ──answered──▶ waiting …
                  └── too many: ended

A connection waits until a request's head is complete. If there is one too many, a waiting one ends: the oldest of the
network that has most of them. So a host that opens thousands only ends its own, and a proxy in front of all clients can
have all of them. A connection that serves a request is never ended in favour of another.
"""

from __future__ import annotations

import ipaddress
import logging
import resource
from typing import Protocol

from ..refusal_log import RefusalLog

log = logging.getLogger(__name__)
MAX_WAITING = 4096
"""Maximum number of connections that wait, idle ones included."""
MAX_HEAD_BYTES = 32 << 20
"""Maximum length of all heads that have not come to their end."""
RESERVED_FILES = 256
"""Files that a process needs beside its clients' connections and what it opens for them."""
FEWEST = 16
"""Connections that a server takes however few files it may open."""
IPV6_NETWORK_BYTES = 8
"""One host may have all addresses of a network of this prefix."""


class ServerConnection(Protocol):
    """What ``Connections`` counts. ``network``: see ``network_of``."""

    network: str

    def end(self) -> None:
        """Close the connection and free its descriptor at once."""


def network_of(address: str) -> str:
    """Return the network by which a client's connections are counted: its /64 for IPv6, else its address."""
    if ":" not in address:
        return address
    try:
        ipv6 = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    # A server at :: serves IPv4 as well, all of which would be one network.
    return str(ipv6.ipv4_mapped or ipv6.packed[:IPV6_NETWORK_BYTES].hex(":", 2))


class Connections:
    """All connections of a server. For the event loop's thread only."""

    def __init__(self, most: int, max_waiting: int = MAX_WAITING, max_head_bytes: int = MAX_HEAD_BYTES) -> None:
        """Set the limits; ``most`` is the maximum number of connections, including those that serve requests."""
        self._most = most
        self._max_waiting = min(max_waiting, max(1, most // 2))
        self._max_head_bytes = max_head_bytes
        self._open: set[ServerConnection] = set()
        self._waiting: dict[str, dict[ServerConnection, int]] = {}
        """Waiting connections of each network, the oldest first, with the bytes of a head that each has sent."""
        self._refusals = RefusalLog(log, "connections")
        self.waiting = 0
        """Number of waiting connections."""
        self.head_bytes = 0
        """Bytes of heads that have not come to their end."""

    @classmethod
    def of_process(cls, files_each: int) -> Connections:
        """Make the counts for this process's server, with as many connections as its limit on open files permits.

        ``files_each`` is the number of files of a connection, including those opened to serve it.
        """
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(max(FEWEST, (files - RESERVED_FILES) // files_each))

    def opened(self, connection: ServerConnection) -> None:
        """Note a new connection, which waits for a request.

        If too many are open, close one that waits, perhaps this one. It is the longest waiting one of the network with
        the most waiting connections.
        """
        self._open.add(connection)
        self.wait(connection)
        while len(self._open) > self._most:
            self._end_longest(f"{self._most} are open, as the limit on open files (ulimit -n) allows")

    def closed(self, connection: ServerConnection) -> None:
        """Remove a closed connection from all counts."""
        self._open.discard(connection)
        self.serve(connection)

    def wait(self, connection: ServerConnection) -> None:
        """Note that a connection waits for a request from now on.

        If too many wait, close the longest waiting one of the network with the most waiting connections.
        """
        self.serve(connection)
        self._waiting.setdefault(connection.network, {})[connection] = 0
        self.waiting += 1
        while self.waiting > self._max_waiting:
            self._end_longest(f"{self._max_waiting} wait for a request")

    def serve(self, connection: ServerConnection) -> None:
        """Stop counting a connection among those that wait for a request. The bytes of its head are no longer counted.

        Do nothing if it does not wait.
        """
        network = self._waiting.get(connection.network)
        if network is None or (held := network.pop(connection, None)) is None:
            return
        self.waiting -= 1
        self.head_bytes -= held
        if not network:
            del self._waiting[connection.network]

    def hold(self, connection: ServerConnection, size: int) -> None:
        """Count ``size`` more bytes of the incomplete request head that a waiting connection has sent.

        If all heads exceed the limit together, close the connection with the longest one. Do nothing if the connection
        does not wait.
        """
        network = self._waiting.get(connection.network, {})
        if connection not in network:
            return
        network[connection] += size
        self.head_bytes += size
        while self.head_bytes > self._max_head_bytes:
            heads = ((held, connection) for network in self._waiting.values() for connection, held in network.items())
            _, largest = max(heads, key=lambda head: head[0])
            self._end(largest, f"{self._max_head_bytes} bytes of heads wait for their ends, and it had most of them")

    def _end_longest(self, reason: str) -> None:
        network = max(self._waiting.values(), key=len)
        self._end(next(iter(network)), f"{reason}, and it had waited longest of those of its network")

    def _end(self, connection: ServerConnection, reason: str) -> None:
        self.closed(connection)
        connection.end()
        self._refusals.add(f"one from {connection.network} was ended: {reason}")
