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
        """See ``Membership``."""
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
        """See ``Membership``."""
        self._network.withdraw()

    def close(self, reason: str) -> None:
        """See ``Membership``."""
        self._network.pause()
        self._peers.close(reason)

    @property
    def is_closed(self) -> bool:
        """See ``Membership``."""
        return self._peers.closed is not None and not self._peers.table.lingering

    def open(self) -> None:
        """See ``Membership``."""
        if self._peers.closed is not None:
            self._peers.closed = None
            self.register()

    def problem(self, now: float) -> str | None:
        """See ``Membership``."""
        # Other instances must find a prefill instance; every other role can serve without a registration.
        return self._network.lost(now) if self._scheduler.role == "prefill" else None

    def found_at(self) -> tuple[str, int] | None:
        """See ``Membership``."""
        port = self._network.bootstrap_port
        return None if port is None else (self._options.advertise_host or "", port)

    def refusal(self) -> Refusal | None:
        """See ``Membership``."""
        return None

    def names_here(self, where: Bootstrap) -> bool:
        """See ``Membership``."""
        if where.port != self._network.bootstrap_port:
            return False
        return where.host in (self._options.host, self._options.advertise_host) or means_this_host(where.host)

    def may_mean_here(self, where: Bootstrap) -> bool:
        """See ``Membership``."""
        return where.port == self._network.bootstrap_port
