"""The peers of an instance, by the addresses that led to them and by their connections."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .peer import Peer


class PeerTable:
    """All peers of one instance: those that are searched for or connected, and gone ones until their link is down."""

    def __init__(self) -> None:
        self.by_address: dict[tuple[str, int], Peer] = {}
        """Peers by host and port of the bootstrap server that names them."""
        self.by_connection: dict[int, Peer] = {}
        """Peers by the number of their connection in the control port."""
        self.closing: list[Peer] = []
        """Gone peers with links that are not down yet."""

    def known(self, epoch: str) -> Peer | None:
        """Return the connected peer of this epoch, if there is one."""
        return next((peer for peer in self.by_connection.values() if peer.epoch == epoch), None)

    def linked(self, number: int) -> list[Peer]:
        """Return the connected peers with the worker's link of this number: a list of one, or none."""
        return [peer for peer in self.by_connection.values() if peer.number == number]

    def is_closing(self, epoch: str) -> bool:
        """Return whether an earlier data link to the instance is not down yet, so that it may still write here."""
        return any(peer.epoch == epoch for peer in self.closing)

    def all(self) -> Iterable[Peer]:
        """Return each peer that is searched for or connected, once."""
        return dict.fromkeys([*self.by_address.values(), *self.by_connection.values()])

    def forget_addresses(self, peer: Peer) -> None:
        """Remove all addresses that lead to a peer."""
        for address in [address for address, other in self.by_address.items() if other is peer]:
            del self.by_address[address]

    def info(self) -> list[dict[str, Any]]:
        """Return all peers for ``/server_info``, JSON-ready, with gone ones until their link is down."""
        return [peer.info() for peer in [*self.all(), *self.closing]]

    @property
    def connected(self) -> int:
        """Number of instances that can send KV here, or take KV from here, now."""
        return sum(peer.readable or peer.writable for peer in self.by_connection.values())

    @property
    def active(self) -> bool:
        """Whether there is any peer, searched for or connected, that needs heartbeats or an answer."""
        return bool(self.by_connection or self.by_address)

    @property
    def lingering(self) -> bool:
        """Whether the link to any gone peer is not down yet."""
        return bool(self.closing)
