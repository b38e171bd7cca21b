"""A prefill's view of the decode instances that are connected to it.

    Hello → (checked, worker connects to the decode's worker) → Welcome → hand-overs, heartbeats → gone

A peer is gone when its connection ends, its worker's link breaks or it falls silent for ``heartbeat_timeout``. Gone is
final: its connection is ended, and the same instance comes back as a new peer, with a new connection, once the worker
has let go of the old one.

Anybody can send to the control port. A connection that says no Hello costs nothing here and soon ends; one that does is
kept only as long as it beats, and there are ``MAX_PEERS`` at most. A Hello replaces the peer of the same epoch only if
it carries the same backend metadata: that holds the secret of the peer's data port, which a stranger doesn't know.
"""

from __future__ import annotations

import hmac
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...messages.base import REASON_CHARS, Message
from ...messages.decode import UndeclaredMessage, shown
from ...messages.handover import PROTOCOL_VERSION, Heartbeat, Hello, Refused, TransferDone, TransferFailed, Welcome
from ...messages.worker import ConnectPeer, DisconnectPeer, PeerConnected, PeerLinkDown, WorkerReady
from ..transfer.page_order import can_exchange
from .control.frames import MESSAGES_A_TURN, TO_DECODE_BYTES
from .control.server import ControlServer
from .host import HandoverHost

log = logging.getLogger(__name__)

MAX_PEERS = 256
"""Decode instances at one prefill."""


@dataclass(slots=True, eq=False)
class DecodePeer:
    """One connected decode instance. ``number``: what the worker calls the link to it. ``welcomed`` once the worker can
    write into its pool.
    """

    identity: int
    number: int
    epoch: str
    heard_at: float
    hello: Hello
    connecting: bool = False
    welcomed: bool = False
    unsent: list[Message] = field(default_factory=list)


class DecodePeers:
    """Owner of the control socket and of the peers behind it."""

    def __init__(
        self,
        host: HandoverHost,
        worker: WorkerReady,
        backend: str,
        heartbeat: tuple[float, float],
        server: ControlServer,
        on_message: Callable[[DecodePeer, Any, float], None],
        on_gone: Callable[[DecodePeer, str], None],
    ) -> None:
        self._host = host
        self._worker = worker
        self._backend = backend
        self._interval, self._timeout = heartbeat
        self._server = server
        self._on_message = on_message
        self._on_gone = on_gone
        self._peers: dict[int, DecodePeer] = {}
        self._closing: dict[int, str] = {}
        self._numbers = itertools.count(1)
        self._beat_at = 0.0
        self._refusals = server.refusals

    def poll(self, now: float) -> None:
        """Read a turn's worth, beat, drop who is silent."""
        self._read(now)
        for identity, reason in self._server.take_ended():
            if identity in self._peers:
                self._gone(self._peers[identity], f"its control connection ended: {reason}")
        for peer in list(self._peers.values()):
            if now - peer.heard_at > self._timeout:
                self._gone(peer, f"the decode instance was silent for {self._timeout:.1f} s")
        if now - self._beat_at >= self._interval:
            self._beat_at = now
            # Also to those that wait for their Welcome: connecting workers may take longer than a heartbeat.
            for peer in self._peers.values():
                self.send(peer, Heartbeat(peer.epoch))

    def _read(self, now: float) -> None:
        left = MESSAGES_A_TURN
        while left > 0:
            try:
                frame = self._server.recv()
            except UndeclaredMessage as e:
                self._refusals.add(str(e))
                left -= 1
                continue
            if frame is None:
                return
            left -= max(1, len(frame[1]))
            for message in frame[1]:
                self._take(frame[0], message, now)

    def send(self, peer: DecodePeer, message: Message) -> None:
        """Queue for the peer; one frame a turn of the loop."""
        peer.unsent.append(message)

    def flush(self) -> None:
        """Send what the turn has queued."""
        for peer in self._peers.values():
            if peer.unsent:
                too_long = self._server.send(peer.identity, peer.unsent)
                peer.unsent = []
                self._server.send(peer.identity, [_instead(m, peer) for m in too_long if isinstance(m, TransferDone)])

    def on_peer_connected(self, event: PeerConnected) -> None:
        """The worker has reached the decode's worker, or has not."""
        for peer in [p for p in self._peers.values() if p.number == event.link and p.connecting]:
            peer.connecting = False
            if event.error is None:
                peer.welcomed = True
                self.send(peer, Welcome(peer.epoch))
                log.info("decode instance %s is connected", shown(peer.epoch))
            else:
                self._refuse(peer.identity, peer.epoch, event.error)
                self._forget(peer)

    def on_peer_link_down(self, event: PeerLinkDown) -> None:
        """The worker can't reach this decode's worker any more."""
        self._closing.pop(event.link, None)
        for peer in [p for p in self._peers.values() if p.epoch == event.peer]:
            if peer.number == event.link:
                self._gone(peer, "the decode instance's worker closed the data link or died", down=True)
            elif not peer.connecting and not peer.welcomed and peer.epoch not in self._closing.values():
                self._connect(peer)

    def info(self) -> list[dict[str, Any]]:
        """For /server_info."""
        return [{"epoch": p.epoch, "state": "ready" if p.welcomed else "connecting"} for p in self._peers.values()]

    @property
    def refused(self) -> int:
        """Frames, messages and Hellos that were refused since the start."""
        return self._refusals.total

    @property
    def connected(self) -> int:
        """Decode instances that can ask for pages now."""
        return sum(peer.welcomed for peer in self._peers.values())

    @property
    def active(self) -> bool:
        """Whether any peer needs heartbeats."""
        return bool(self._peers)

    def _take(self, identity: int, message: Any, now: float) -> None:
        peer = self._peers.get(identity)
        if peer is not None:
            peer.heard_at = now
        if isinstance(message, Hello):
            self._greet(identity, message, now)
        elif message.epoch != self._host.epoch:
            self._refusals.add(f"dropped {type(message).__name__} for epoch {message.epoch}, which is not this one's")
        elif isinstance(message, Heartbeat):
            return
        elif peer is None or not peer.welcomed:
            self._refusals.add(f"dropped {type(message).__name__} of a decode instance that is not connected")
        elif message.handover.epoch != peer.epoch:
            self._refusals.add(f"dropped {type(message).__name__} for a hand-over of another decode instance")
        else:
            self._on_message(peer, message, now)

    def _greet(self, identity: int, hello: Hello, now: float) -> None:
        problem = self._problem(hello) or self._intrusion(identity, hello)
        if problem is not None:
            self._refuse(identity, hello.sender, problem)
            return
        for old in [p for p in self._peers.values() if p.epoch == hello.sender or p.identity == identity]:
            self._gone(old, "the decode instance connected anew", keep=old.identity == identity)
        self._server.keep(identity)
        peer = self._peers[identity] = DecodePeer(identity, next(self._numbers), hello.sender, now, hello)
        if peer.epoch not in self._closing.values():
            self._connect(peer)

    def _problem(self, hello: Hello) -> str | None:
        """Why the pair can't exchange pages, None where it can."""
        worker = self._worker
        if hello.version != PROTOCOL_VERSION:
            return (
                f"protocol version {hello.version} there, {PROTOCOL_VERSION} here; run the same pdserve on both sides"
            )
        if hello.epoch != self._host.epoch:
            return "the registration is that of an earlier start of this instance; ask for it again"
        if hello.backend != self._backend:
            return f"transfer backend {hello.backend} there, {self._backend} here; start both with the same one"
        if hello.fingerprint != worker.fingerprint:
            return f"other model weights there ({hello.fingerprint}) than here ({worker.fingerprint})"
        if not can_exchange(hello.layout, worker.layout):
            flags = "--page-size, --dtype and --kv-cache-dtype"
            return f"KV layout {hello.layout} there, {worker.layout} here; use equal {flags}"
        return None

    def _intrusion(self, identity: int, hello: Hello) -> str | None:
        """Why this Hello may not take a place among the peers, None where it may."""
        for peer in self._peers.values():
            if peer.epoch == hello.sender:
                known = hmac.compare_digest(peer.hello.metadata, hello.metadata)
                return None if known else "a decode instance of this epoch is connected, with another data port"
        if identity not in self._peers and len(self._peers) >= MAX_PEERS:
            return f"{MAX_PEERS} decode instances are connected, which is the most; use another prefill instance"
        return None

    def _refuse(self, identity: int, epoch: str, reason: str) -> None:
        self._refusals.add(f"refused decode instance {epoch}: {reason}")
        self._server.send(identity, [Refused(epoch, shown(reason, REASON_CHARS))])

    def _connect(self, peer: DecodePeer) -> None:
        peer.connecting = True
        self._host.to_worker(ConnectPeer(peer.epoch, peer.number, peer.hello.metadata))

    def _gone(self, peer: DecodePeer, reason: str, *, down: bool = False, keep: bool = False) -> None:
        if peer.welcomed:
            log.warning("decode instance %s is gone: %s", shown(peer.epoch), reason)
        else:
            self._refusals.add(f"decode instance {peer.epoch} is gone before it was connected: {reason}")
        self._forget(peer, keep=keep)
        if not down and (peer.welcomed or peer.connecting):
            self._closing[peer.number] = peer.epoch
            self._host.to_worker(DisconnectPeer(peer.epoch, peer.number))
        self._on_gone(peer, reason)

    def _forget(self, peer: DecodePeer, *, keep: bool = False) -> None:
        """``keep``: the connection goes on, for another peer."""
        del self._peers[peer.identity]
        if not keep:
            self._server.drop(peer.identity)


def _instead(done: TransferDone, peer: DecodePeer) -> TransferFailed:
    reason = f"the prompt's logprobs are longer than {TO_DECODE_BYTES >> 20} MiB; ask for fewer top_logprobs"
    return TransferFailed(peer.epoch, done.handover, 400, reason)
