"""TCP listeners of backends: where they are, and where others reach them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable

from ....mem_cache.kv_pages.region import RegionError
from ....runtime.web.ports import is_loopback
from ...errors import BadMetadata
from ...wire import tcp_socket
from ...wire.listener import BACKLOG
from .handshake import Offer

Prepare = Callable[[socket.socket], None]
"""Sets a socket up before it is used."""


def listen(
    host: str, port: int, advertise_host: str | None, prepare: Prepare = lambda sock: None
) -> tuple[socket.socket, str, int]:
    """Open a TCP listener, and return it with the address and port at which other instances reach it.

    ``port`` 0 takes a free one. ``prepare`` sets up the socket before. Raises ``RegionError`` and ``OSError``.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of the last life that are still closing don't keep the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        prepare(sock)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    bound, port = sock.getsockname()[:2]
    return sock, reachable_address(bound) if advertise_host is None else advertised_address(advertise_host, sock), port


def dial(offer: Offer, prepare: Prepare) -> socket.socket:
    """Start to connect to the place of ``offer``, and return the socket, which is not connected yet.

    ``prepare`` sets it up before. Raises ``OSError`` and ``BadMetadata``.
    """
    sock = socket.socket(address_family(offer), socket.SOCK_STREAM)
    try:
        prepare(sock)
        tcp_socket.start_connecting(sock, offer.place, offer.port)
    except OSError:
        sock.close()
        raise
    return sock


def unreachable(offer: Offer, reason: str) -> str:
    """Return the error message for users after dialling a peer failed because of ``reason``, with what to check."""
    hint = (
        "it offers a loopback address: start it with a --host that this host can reach"
        if ipaddress.ip_address(offer.place).is_loopback
        else "check that it runs, and that its --host and firewall let this host in"
    )
    return f"can't reach the KV data port of peer {offer.epoch} at {offer.place}:{offer.port}: {reason}; {hint}"


def address_family(offer: Offer) -> socket.AddressFamily:
    """Return the family of the offered address. Raises ``BadMetadata`` for a name, because its look-up could block."""
    try:
        return tcp_socket.address_family(offer.place)
    except ValueError as e:
        raise BadMetadata(f"peer {offer.epoch} offers {offer.place!r}, which is no IP address") from e


def reachable_address(bound: str) -> str:
    """Return the IP address at which peers reach a socket bound to ``bound``.

    For "any address" it is the one of the route out of this host, or loopback without such a route.
    """
    address = ipaddress.ip_address(bound)
    if not address.is_unspecified:
        return bound
    # Which of our addresses leads outwards? Connecting a UDP socket asks the routing table and sends nothing.
    family, outside = (socket.AF_INET6, "2001:db8::1") if address.version == 6 else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((outside, 9))
        except OSError:
            return "::1" if address.version == 6 else "127.0.0.1"  # no way out of this host
        return str(sock.getsockname()[0])


def advertised_address(name: str, listener: socket.socket) -> str:
    """Look up the IP address of ``name``, in the listener's family.

    It is done here, since a connecting peer must not wait for a look-up. Raises ``RegionError``, and closes
    ``listener``, if there is no address, or only a loopback one although the listener is on none.
    """
    try:
        found = socket.getaddrinfo(name, None, family=listener.family, type=socket.SOCK_STREAM)
    except OSError as e:
        listener.close()
        raise RegionError(f"--advertise-host {name}: {e.strerror}; give an address, or a name that has one") from e
    address = str(found[0][4][0])
    if is_loopback(address) and not is_loopback(str(listener.getsockname()[0])):
        listener.close()
        raise RegionError(
            f"--advertise-host {name} is {address} here, which others don't reach: give the address itself"
        )
    return address
