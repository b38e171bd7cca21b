"""This instance among others: its registration at the bootstrap server, and whether it exchanges KV at all now."""

from __future__ import annotations

from ...messages.requests import Bootstrap
from ...runtime.web.ports import means_this_host
from ...scheduler.refusals import Refusal
from ...scheduler.scheduler import Scheduler
from ..bootstrap.registration import Registration
from .local_instance import digest
from .network import Network
from .peers import Peers

LEASE_SECONDS = 6.0
"""Lifetime of a registration at the bootstrap server, in seconds."""


class InstanceMembership:
    """The registration of one instance, and its connections to peers as a whole; see ``Membership``."""

    def __init__(self, epoch: str, scheduler: Scheduler, network: Network, peers: Peers) -> None:
        self._epoch = epoch
        self._options = scheduler.options
        self._scheduler = scheduler
        self._network = network
        self._peers = peers

    def register(self) -> None:
        """Register with this instance's own bootstrap server, or update the registration there with the current role.

        Does nothing while the instance is closed or draining.
        """
        if self._peers.closed is not None or self._scheduler.draining:
            return  # the bootstrap server refuses a withdrawn registration for ever
        worker = self._scheduler.worker
        registration = Registration(
            epoch=self._epoch,
            control_port=self._network.port.port,
            fingerprint=worker.fingerprint,
            layout=worker.layout,
            backend=self._options.disaggregation_transfer_backend,
            pool=digest(worker.backend_metadata),
            ttl=LEASE_SECONDS,
            role=self._scheduler.role,
            host=self._options.advertise_host or "",
        )
        self._network.register(registration)

    def withdraw(self) -> None:
        """Remove the registration at the bootstrap server for good. Connected peers stay connected."""
        self._network.withdraw()

    def close(self, reason: str) -> None:
        """Suspend the registration and disconnect all peers. New peers are refused for ``reason`` until ``open``.

        ``reason`` also goes to the log and into errors of requests that need a peer. Data links may go down later.
        """
        self._network.pause()
        self._peers.close(reason)

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called and the data links to all disconnected peers are down."""
        return self._peers.closed is not None and not self._peers.table.lingering

    def open(self) -> None:
        """Accept peers again after ``close``, and register anew unless the instance is draining."""
        if self._peers.closed is not None:
            self._peers.closed = None
            self.register()

    def problem(self, now: float) -> str | None:
        """Return why a prefill instance's registration has expired; None while it is valid, and for other roles."""
        # Other instances must find a prefill instance; every other role can serve without a registration.
        return self._network.lost(now) if self._scheduler.role == "prefill" else None

    def found_at(self) -> tuple[str, int] | None:
        """Return the advertised host, "" without one, and the port of this instance's own bootstrap server.

        None before that server listens.
        """
        port = self._network.bootstrap_port
        return None if port is None else (self._options.advertise_host or "", port)

    def refusal(self) -> Refusal | None:
        """Return None: an instance with peers takes requests with a hand-over."""
        return None

    def names_here(self, where: Bootstrap) -> bool:
        """Return whether ``where`` has this instance's bootstrap port and a host that is certainly this one.

        Such hosts are the one it listens on, the advertised one, and addresses that stay on the machine.
        """
        if where.port != self._network.bootstrap_port:
            return False
        return where.host in (self._options.host, self._options.advertise_host) or means_this_host(where.host)

    def may_mean_here(self, where: Bootstrap) -> bool:
        """Return whether ``where`` has this instance's bootstrap port, whatever its host is.

        Its host may be a name or address of this machine that ``names_here`` does not know. False before the bootstrap
        server listens.
        """
        return where.port == self._network.bootstrap_port
