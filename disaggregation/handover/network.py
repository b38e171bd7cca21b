"""What a ``KVManager`` reaches others by: the control port, bootstrap servers, the own registration.

Apart from it, so that a simulation can put one of its own in this place.
"""

from __future__ import annotations

import zmq

from ...runtime.child import ChildContext
from ...runtime.cluster_secret import ClusterSecret
from ..bootstrap.finder import RegistrationFinder
from ..bootstrap.lease import LeaseKeeper
from ..bootstrap.port_file import announced_port
from ..bootstrap.registration import Reached, Registration
from .control.port import ControlPort
from .mailbox import Mailbox


class Network:
    """The real one. What must block (asking bootstrap servers, renewing a lease) runs in small threads, whose results
    come back through a mailbox that wakes the loop. Raises ``OSError`` where it can't listen on the control port.
    """

    def __init__(self, ctx: ChildContext) -> None:
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
        """Make ``poller`` return when something has come."""
        for descriptor in (self._found.fileno(), self.port.fileno()):
            poller.register(descriptor, zmq.POLLIN)

    def find(self, host: str, port: int) -> None:
        """Ask the bootstrap server at this address; ``take_found`` brings the answer."""
        self._finder.find(host, port)

    def take_found(self) -> list[tuple[str, int, Reached | str]]:
        """What bootstrap servers have answered: a registration, or why there is none."""
        return self._found.take_all()

    @property
    def bootstrap_port(self) -> int | None:
        """Of this instance's own bootstrap server, None before it has one."""
        if self._bootstrap_port is None:
            self._bootstrap_port = announced_port(self._ctx.run_dir)
        return self._bootstrap_port

    def register(self, registration: Registration) -> None:
        """Become known to the own bootstrap server, by a lease that is renewed as long as this process lives; or known
        anew, as what has changed.
        """
        if self._lease is not None:
            self._lease.change(registration)
            return
        port = lambda: self.bootstrap_port  # noqa: E731
        self._lease = LeaseKeeper(registration, self._ctx.options.host, port, self._ctx.secret)
        self._lease.start()

    def pause(self) -> None:
        """Others shall not find this instance until it registers again."""
        if self._lease is not None:
            self._lease.pause()

    def withdraw(self) -> None:
        """Others shall not find this instance any more."""
        if self._lease is not None:
            self._lease.withdraw()
            self._lease = None

    def lost(self, now: float) -> str | None:
        """Why others can't find this instance, None where they can, or shall not."""
        return self._lease.lost(now) if self._lease is not None else None
