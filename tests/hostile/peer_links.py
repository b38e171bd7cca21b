"""The control connections of a hostile peer: it dials instances, is dialled by them, and greets as an honest peer does.

What it says on a connection once both have greeted is up to its owner.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import msgspec

from pdserve.disaggregation.bootstrap.registration import Registration, decode_registration
from pdserve.disaggregation.errors import LinkLost
from pdserve.disaggregation.handover.control.port import ControlPort
from pdserve.disaggregation.handover.local_instance import digest
from pdserve.messages.base import HandoverId
from pdserve.messages.handover import Heartbeat, Hello, Invite
from pdserve.runtime.cluster_secret import ClusterSecret

from .cluster import Cluster
from .peer_messages import Messages
from .peer_ports import BootstrapPort, DataPort
from .watch import Record

EPOCHS = 3
"""Instances that one thread stands for: each has one link to an instance, since a second one ends the first."""
HEARTBEAT_SECONDS = 0.2
FRAMES_A_TURN = 200


class Link:
    """A control connection to one instance. ``met``: it has greeted. ``invitation``: how its pool is written."""

    def __init__(self, identity: int, messages: Messages) -> None:
        self.identity, self.messages = identity, messages
        self.met = False
        self.invitation = b""


class PeerLinks:
    """All links of one thread, and the ports that it tells instances of. ``hear`` is called with each message."""

    def __init__(self, cluster: Cluster, record: Record, rng: random.Random, hear: Callable[[Link, Any], None]) -> None:
        secret = ClusterSecret.read(str(cluster.secret_file))
        assert secret is not None
        self.port = ControlPort("127.0.0.1", keys=secret.keys("control"))
        self.registrations = {role: _registered(port) for role, port in cluster.bootstraps.items()}
        self.rooms: set[int] = set()
        """Rooms of signed requests one leg of which is this peer's."""
        self.links: dict[int, Link] = {}
        self._record, self._rng, self._hear = record, rng, hear
        self._epochs = [secrets.token_hex(8) for _ in range(EPOCHS)]
        self._data = DataPort(rng, self.registrations["prefill"], self.rooms, record.violated)
        self._bootstrap = BootstrapPort(self._registration, random.Random(rng.getrandbits(32)))
        self._beat = 0.0

    @property
    def bootstrap_port(self) -> int:
        """The port of this peer's own bootstrap server."""
        return self._bootstrap.port

    def close(self) -> None:
        """Hang up."""
        self.port.close()
        self._data.close()
        self._bootstrap.close()

    def dial(self) -> None:
        """Connect to one instance as one epoch, unless that has a link to it."""
        real, mine = self.registrations[self._rng.choice(sorted(self.registrations))], self._rng.choice(self._epochs)
        if any((link.messages.epoch, link.messages.mine) == (real.epoch, mine) for link in self.links.values()):
            return
        identity = self.port.dial("127.0.0.1", real.control_port)
        link = self.links[identity] = self._link(identity, real.epoch, mine)
        self._record.sent("dial", real.epoch)
        self.port.send(identity, [self.hello(real.epoch, mine)])
        link.messages.rooms.append(HandoverId(mine, self._rng.getrandbits(63), 1))

    def read(self) -> None:
        """Take in what has come, and send heartbeats."""
        for _ in range(FRAMES_A_TURN):
            try:
                frame = self.port.recv()
            except Exception as e:  # noqa: BLE001
                # An instance that sends what no instance says is a finding.
                self._record.violated(f"an instance broke the protocol: {e!r}")
                return
            if frame is None:
                break
            for message in frame[1]:
                self._heard(frame[0], message)
        for ended in self.port.take_ended():
            self.links.pop(ended.identity, None)
        if time.monotonic() - self._beat > HEARTBEAT_SECONDS:
            self._beat = time.monotonic()
            for link in self.links.values():
                self.port.send(link.identity, [Heartbeat(link.messages.epoch)])

    def some(self) -> list[Link]:
        """Draw one link that has greeted, if there is any."""
        met = [link for link in self.links.values() if link.met]
        return self._rng.sample(met, min(len(met), 1))

    def send(self, link: Link, kind: str, payload: bytes) -> None:
        """Send a frame, whatever it holds, and record it as ``kind``."""
        connection = self.port._peers.get(link.identity)
        if connection is None or not payload:
            return
        self._record.sent(kind, payload[:300])
        with suppress(LinkLost):  # the next turn reads that it is over
            connection.send([payload])

    def send_raw(self, link: Link, kind: str, data: bytes) -> None:
        """Send bytes that are no sealed frame on a connection that has greeted."""
        connection = self.port._peers.get(link.identity)
        if connection is not None and connection.greeted:
            self._record.sent(kind, data)
            with suppress(OSError):
                connection.stream.sock.send(data)

    def leave(self, link: Link) -> None:
        """Hang up in the middle."""
        self._record.sent("leave", link.messages.epoch)
        self.port.drop(link.identity)
        self.links.pop(link.identity, None)

    def change_epochs(self) -> None:
        """Stand for other instances from now on."""
        self._epochs = [secrets.token_hex(8) for _ in range(EPOCHS)]

    def hello(self, epoch: str, sender: str) -> Hello:
        """Greet the instance ``epoch`` in the name of ``sender``, which is otherwise like the real prefill."""
        real = self.registrations["prefill"]
        link = self._rng.getrandbits(40) + 1
        metadata = self._data.offer(sender)
        return Hello(epoch, sender, link, real.version, real.fingerprint, real.layout, real.backend, metadata)

    def _heard(self, identity: int, message: Any) -> None:
        link = self.links.get(identity)
        if isinstance(message, Hello):
            if link is None:
                self.port.keep(identity)
                link = self.links[identity] = self._link(identity, message.sender, message.epoch)
                self.port.send(identity, [self.hello(message.sender, message.epoch)])
            link.met = True
            if self._rng.random() < 0.7:
                self.port.send(identity, [Invite(link.messages.epoch, self._data.offer(link.messages.mine))])
        elif link is not None:
            self._hear(link, message)

    def _link(self, identity: int, epoch: str, mine: str) -> Link:
        page = self.registrations["prefill"].layout.page_size
        return Link(identity, Messages(self._rng, mine, epoch, page))

    def _registration(self) -> Registration:
        """Return what this peer's bootstrap server tells: another prefill like the real one."""
        real, epoch = self.registrations["prefill"], self._epochs[0]
        pool = digest(self._data.offer(epoch))
        return msgspec.structs.replace(real, epoch=epoch, control_port=self.port.port, pool=pool)


def _registered(port: int) -> Registration:
    return decode_registration(httpx.get(f"http://127.0.0.1:{port}/registration", trust_env=False).content)
