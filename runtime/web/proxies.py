"""The address of a client behind reverse proxies, taken from X-Forwarded-For only as far as proxies are trusted."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # every command reads options, and few of them serve
    from starlette.types import Scope

FORWARDED_FOR = b"x-forwarded-for"
MAX_HOPS = 32
"""Entries of the header that are read, from the right: each trusted proxy adds one."""
WITH_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+))(?::[0-9]{1,5})?", re.ASCII)
UNKNOWN = "?"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class TrustedProxies:
    """The reverse proxies with a trusted X-Forwarded-For.

    ``option`` lists their addresses and networks, separated by commas. Raises ``ValueError``, with what to write
    instead.
    """

    def __init__(self, option: str | None = None) -> None:
        words = [word.strip() for word in (option or "").split(",") if word.strip()]
        try:
            self._networks = [ipaddress.ip_network(word) for word in words]
        except ValueError as e:
            raise ValueError(f"{e}; write addresses and networks like 10.0.0.7,192.168.0.0/16,::1") from None

    def client(self, scope: Scope) -> str:
        """Return the client of an ASGI request for logs: ADDRESS:PORT of the connection, or the address from proxies.

        That is the rightmost address in X-Forwarded-For that is not a trusted proxy's. The client may have invented
        everything further left. An entry that is no address ends the search at the proxy that reported it.
        """
        host, port = (*(scope.get("client") or (UNKNOWN, 0)), 0)[:2]
        peer = parse_address(str(host))
        if peer is None or not self._is_trusted(peer):
            return f"{host}:{port}" if port else str(host)
        for entry in self._entries(scope):
            address = parse_address(entry)
            if address is None:
                break
            peer = address
            if not self._is_trusted(address):
                break
        return str(peer)

    def _is_trusted(self, address: Address) -> bool:
        return any(address in network for network in self._networks)

    @staticmethod
    def _entries(scope: Scope) -> list[str]:
        """Return the header's entries, the last first; several headers count as one."""
        values = [value for name, value in scope["headers"] if name == FORWARDED_FOR]
        last = b",".join(values).rsplit(b",", MAX_HOPS)[-MAX_HOPS:]
        return [entry.decode("latin-1").strip() for entry in reversed(last)]


def parse_address(text: str) -> Address | None:
    """Parse an IP address with or without a port; return None for anything else.

    An IPv4 address within IPv6 gives the IPv4 address. Scopes (``fe80::1%eth0``) are refused, because Python accepts
    any characters in them.
    """
    if (with_port := WITH_PORT.fullmatch(text)) is not None:
        text = with_port[1] or with_port[2]
    if "%" in text:
        return None
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
