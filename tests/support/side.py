"""An instance's peers over real sockets, without a scheduler or a worker: a test says what those do."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Any

from pdserve.disaggregation.bootstrap.registration import Reached, Registration
from pdserve.disaggregation.handover.control.port import ControlPort
from pdserve.disaggregation.handover.local_instance import LocalInstance, digest
from pdserve.disaggregation.handover.peer import Peer
from pdserve.disaggregation.handover.peers import Peers
from pdserve.messages.base import Message
from pdserve.messages.worker import (
    AdmitPeer,
    ConnectPeer,
    DisconnectPeer,
    PeerAdmitted,
    PeerConnected,
    PeerLinkDown,
    WorkerReady,
)
from support.layouts import uniform_layout
from support.machine import limit
from support.processes import wait_until

LAYOUT = uniform_layout(page_size=16, num_layers=2, kv_heads=1, head_dim=8, dtype="float32", page_bytes=4096)
LIMIT = limit(10.0)


def make_worker(metadata: bytes = b"mine") -> WorkerReady:
    return WorkerReady("f", 100, 2048, 4096, LAYOUT, "cpu", "cpu", "float32", metadata, {})


class Side:
    """Peers of the instance ``epoch``. ``commands``: to its worker; ``heard``: messages about hand-overs."""

    def __init__(self, epoch: str = "P", keys: Sequence[bytes] = ()) -> None:
        self.epoch = epoch
        self.port = ControlPort("127.0.0.1", keys=keys)
        self.commands: list[Message] = []
        self.heard: list[Any] = []
        self.gone: list[tuple[str, str]] = []
        self.lost: list[Peer] = []
        self.down: list[Peer] = []
        self.too_long: list[tuple[str, Message]] = []
        self.asked: list[tuple[str, int]] = []
        self.now = 100.0
        self.peers = Peers(
            LocalInstance(epoch, make_worker(f"pool of {epoch}".encode()), "tcp"),
            (0.3, 1.5),
            self.port,
            lambda host, port: self.asked.append((host, port)),
            self.commands.append,
            self,
        )

    # --- PeerOwner ---

    def on_message(self, peer: Peer, message: Any, now: float) -> None:
        self.heard.append(message)

    def on_gone(self, peer: Peer) -> None:
        self.gone.append((peer.epoch, peer.reason))
        self.lost.append(peer)

    def on_down(self, peer: Peer) -> None:
        self.down.append(peer)

    def on_too_long(self, peer: Peer, message: Message) -> None:
        self.too_long.append((peer.epoch, message))

    # --- what a test does ---

    def turn(self) -> None:
        self.peers.poll(self.now)
        self.peers.flush()

    def until(self, condition) -> None:
        def turned():
            self.turn()
            return condition()

        wait_until(turned, LIMIT, "it has come to pass")

    def readable(self) -> bool:
        """Return whether the side's loop would wake."""
        return bool(select.select([self.port], [], [], 0)[0])

    def work(self, *, down: bool = True) -> None:
        """Let the worker carry out its commands since the last time. ``down``: also report that links end."""
        sent, self.commands[:] = self.commands[:], []
        for command in sent:
            if isinstance(command, AdmitPeer):
                self.peers.on_event(PeerAdmitted(command.peer, command.link), self.now)
            elif isinstance(command, ConnectPeer):
                self.peers.on_event(PeerConnected(command.peer, command.link), self.now)
            elif isinstance(command, DisconnectPeer) and down:
                self.peers.on_event(PeerLinkDown(command.peer, command.link), self.now)

    def links(self, epoch: str, metadata: bytes | None = None) -> list[int]:
        """Return the numbers of links that the worker was told to connect since ``work``."""
        sent = [m for m in self.commands if isinstance(m, ConnectPeer)]
        return [m.link for m in sent if m.peer == epoch and metadata in (None, m.metadata)]

    def registration(self, **changes) -> Registration:
        fields = {"epoch": self.epoch, "control_port": self.port.port, "fingerprint": "f", "layout": LAYOUT}
        fields["pool"] = digest(f"pool of {self.epoch}".encode())
        return Registration(**{**fields, "backend": "tcp", "ttl": 5.0, **changes})

    def ask_for(self, other: Side, host: str = "other") -> Peer:
        """Want KV of ``other``, which the bootstrap server at ``host`` knows."""
        peer = self.peers.peer_at(host, 1, self.now)
        self.peers.on_found(host, 1, Reached(other.registration(), "127.0.0.1"), self.now)
        return peer

    def close(self) -> None:
        self.port.close()
