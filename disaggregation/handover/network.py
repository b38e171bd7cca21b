"""Network access of a ``KVManager``: the control port, bootstrap servers and this instance's registration.

It is a separate object so that a simulation can replace it.
"""

from __future__ import annotations

import zmq

from ...runtime.child import ChildContext
from ...runtime.cluster_secret import ClusterSecret
from ...scheduler.options import SchedulerOptions
from ..bootstrap.finder import RegistrationFinder
from ..bootstrap.lease import LeaseKeeper
from ..bootstrap.port_file import announced_port
from ..bootstrap.registration import Reached, Registration
from .control.port import ControlPort
from .mailbox import Mailbox


class Network:
    """The real network. Raises ``OSError`` if it can't listen on the control port.

    Blocking calls (asking bootstrap servers, renewing a lease) run in small threads. Answers of bootstrap servers come
    back through a mailbox that wakes the loop.
    """

    def __init__(self, ctx: ChildContext[SchedulerOptions]) -> None:
        options = ctx.options
        secret = ClusterSecret.read(options.cluster_secret_file)
        keys = secret.keys("control") if secret is not None else []
        self.port = ControlPort(options.host, options.disaggregation_control_port, keys)
        self._ctx = ctx
        self._found: Mailbox[tuple[str, int, Reached | str]] = Mailbox()
        self._finder = RegistrationFinder(lambda host, port, answer: self._found.put((host, port, answer)))
        self._lease: LeaseKeeper | None = None
        self._bootstrap_port: int | None = None

    def wake(self, poller: zmq.Poller) -> None:
        """Register the network's descriptors with ``poller``, so that it returns when an answer or a message has
        arrived.
        """
        for descriptor in (self._found.fileno(), self.port.fileno()):
            poller.register(descriptor, zmq.POLLIN)

    def find(self, host: str, port: int) -> None:
        """Begin to ask the bootstrap server at this address for its registration. ``take_found`` returns the answer
        later.
        """
        self._finder.find(host, port)

    def take_found(self) -> list[tuple[str, int, Reached | str]]:
        """Return new answers of bootstrap servers as (host, port, registration or why there is none). Never wait."""
        return self._found.take_all()

    @property
    def bootstrap_port(self) -> int | None:
        """Port of this instance's own bootstrap server, None before it listens."""
        if self._bootstrap_port is None:
            self._bootstrap_port = announced_port(self._ctx.run_dir)
        return self._bootstrap_port

    def register(self, registration: Registration) -> None:
        """Begin to register with this instance's own bootstrap server, or change the registration.

        The registration is a lease that a thread renews as long as this process lives.
        """
        if self._lease is not None:
            self._lease.change(registration)
            return
        port = lambda: self.bootstrap_port  # noqa: E731
        self._lease = LeaseKeeper(registration, self._ctx.options.host, port, self._ctx.secret)
        self._lease.start()

    def pause(self) -> None:
        """Suspend the registration: other instances don't find this one until ``register`` is called again."""
        if self._lease is not None:
            self._lease.pause()

    def withdraw(self) -> None:
        """Withdraw the registration for good: other instances don't find this one any more."""
        if self._lease is not None:
            self._lease.withdraw()
            self._lease = None

    def lost(self, now: float) -> str | None:
        """Return why other instances can't find this one at ``now``; None if they can, or if it is not registered or
        paused.
        """
        return self._lease.lost(now) if self._lease is not None else None
