"""The connections of one HTTP server: how many there may be, and which ones end when there are too many.

    opened ──▶ waiting ──head complete──▶ serving ──answered──▶ waiting …
                  └── too many: ended

A connection waits until a request's head is complete. One too many ends one that waits: the one that has waited
longest, of the network that has most of them. So a host that opens thousands takes its own places, and one proxy in
front of everybody can have them all. A connection that serves a request is never ended for another.
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


class Connection(Protocol):
    """What ``Connections`` counts. ``network``: see ``network_of``."""

    network: str

    def end(self) -> None:
        """Close the connection and free its descriptor at once."""


def network_of(address: str) -> str:
    """Return the address of a client, or the network where an IPv6 host has more than one."""
    if ":" not in address:
        return address
    try:
        ipv6 = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    # A server at :: serves IPv4 as well, all of which would be one network.
    return str(ipv6.ipv4_mapped or ipv6.packed[:IPV6_NETWORK_BYTES].hex(":", 2))


class Connections:
    """Event-loop thread only."""

    def __init__(self, most: int, max_waiting: int = MAX_WAITING, max_head_bytes: int = MAX_HEAD_BYTES) -> None:
        """``most``: maximum number of connections, those that serve included."""
        self._most = most
        self._max_waiting = min(max_waiting, max(1, most // 2))
        self._max_head_bytes = max_head_bytes
        self._open: set[Connection] = set()
        self._waiting: dict[str, dict[Connection, int]] = {}
        """By network: each connection that waits, and how much of a head it has sent. Longest first."""
        self._refusals = RefusalLog(log, "connections")
        self.waiting = 0
        """Connections that wait."""
        self.head_bytes = 0
        """Bytes of heads that have not come to their end."""

    @classmethod
    def of_process(cls, files_each: int) -> Connections:
        """As many as the process may open files for. ``files_each``: of a connection and what is opened to serve it."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(max(FEWEST, (files - RESERVED_FILES) // files_each))

    def opened(self, connection: Connection) -> None:
        """A new connection. It waits, or is ended where all others serve requests."""
        self._open.add(connection)
        self.wait(connection)
        while len(self._open) > self._most:
            self._end_longest(f"{self._most} are open, as the limit on open files (ulimit -n) allows")

    def closed(self, connection: Connection) -> None:
        """It is gone."""
        self._open.discard(connection)
        self.serve(connection)

    def wait(self, connection: Connection) -> None:
        """It waits for a request, from now on."""
        self.serve(connection)
        self._waiting.setdefault(connection.network, {})[connection] = 0
        self.waiting += 1
        while self.waiting > self._max_waiting:
            self._end_longest(f"{self._max_waiting} wait for a request")

    def serve(self, connection: Connection) -> None:
        """It waits no longer."""
        network = self._waiting.get(connection.network)
        if network is None or (held := network.pop(connection, None)) is None:
            return
        self.waiting -= 1
        self.head_bytes -= held
        if not network:
            del self._waiting[connection.network]

    def hold(self, connection: Connection, size: int) -> None:
        """``size`` bytes more have come of a head that is not complete. Too many of all end the longest head."""
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

    def _end(self, connection: Connection, reason: str) -> None:
        self.closed(connection)
        connection.end()
        self._refusals.add(f"one from {connection.network} was ended: {reason}")
