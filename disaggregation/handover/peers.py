"""All instances that this one exchanges KV with: finding, greeting, heartbeats and the detection of dead instances.

A peer counts as dead at the first of three events:

- The control connection ends.
- The worker loses the data link.
- The peer is silent for ``heartbeat_timeout``.

An instance has one ``Peer``, whichever address led to it and whichever side
dialled. The worker learns of an instance's next peer only after the link of the last one is down. Links are numbered,
so that a late event of one link isn't attributed to the next.

Two instances may dial each other at once. The connection made by the smaller epoch stands. That instance ignores the
other's Hello unless its own connection fails, and the other instance switches to it.

Any process can connect to the control port. A connection without a valid Hello costs nothing here and ends soon. One
with a valid Hello is kept only as long as it sends heartbeats, and there are at most ``MAX_PEERS``.

An instance that dials proves its epoch by the metadata of its transfer backend. They hold a secret that it sends only
to instances that it dials or invites. A Hello can replace a peer only if its metadata have the digest that is known of
that peer. A peer that dialled is asked for KV only if they have the digest of the registration.
"""

from __future__ import annotations

import hmac
import itertools
import logging
from collections.abc import Callable
from typing import Any, Protocol

from ...messages.base import REASON_CHARS, Message
from ...messages.decode import shown
from ...messages.handover import (
    Heartbeat,
    Hello,
    Invite,
    Refused,
    Welcome,
)
from ...messages.moves import MoveOffer, MoveRefused
from ...messages.worker import (
    DisconnectPeer,
    PeerAdmitted,
    PeerCommand,
    PeerConnected,
    PeerEvent,
    PeerFailed,
    PeerLinkDown,
)
from ...runtime.metrics import Metrics, counter, gauge
from ..bootstrap.registration import Reached
from .control.port import ControlPort, read_messages
from .kv_directions import KVDirections
from .local_instance import LocalInstance, digest
from .peer import Peer, PeerState, Reading, Spare
from .peer_rights import PeerRights
from .peer_table import PeerTable

log = logging.getLogger(__name__)

MAX_PEERS = 256
"""Maximum connected peers, inbound and outbound."""
NO_MOVES = "it takes requests only from instances with the same --cluster-secret-file"


class PeerOwner(Protocol):
    """Callbacks for the messages of hand-overs and for the end of peers."""

    def on_message(self, peer: Peer, message: Any, now: float) -> None:
        """Handle a message of a hand-over or migration. The peer is known to be allowed to send it."""

    def on_gone(self, peer: Peer) -> None:
        """Handle the end of a peer. Its worker may still write here, until ``on_down``."""

    def on_down(self, peer: Peer) -> None:
        """Handle the end of a gone peer's data link: it can't write here any more."""

    def on_too_long(self, peer: Peer, message: Message) -> None:
        """Handle a message to ``peer`` that was not sent because it exceeds the peer's frame limit."""


class Peers:
    """Owner of the peers and of their connections in the control port.

    ``find`` asks the bootstrap server at a host and port without blocking. The answer goes to ``on_found``.
    """

    def __init__(
        self,
        local: LocalInstance,
        heartbeat: tuple[float, float],
        port: ControlPort,
        find: Callable[[str, int], None],
        to_worker: Callable[[PeerCommand], None],
        owner: PeerOwner,
        *,
        takes_moves: bool = True,
    ) -> None:
        self._rights = PeerRights(local.epoch, takes_moves=takes_moves)
        self._local = local
        self._interval, self._timeout = heartbeat
        self._port = port
        self._find = find
        self._to_worker = to_worker
        self._directions = KVDirections(local.worker.backend_metadata, port, to_worker)
        self._owner = owner
        self.table = PeerTable()
        self._numbers = itertools.count(1)
        self._beat_at = 0.0
        self._refusals = port.refusals
        self.closed: str | None = None
        """Why new peers are refused. None while they are accepted."""

    def peer_at(self, host: str, port: int, now: float, *, want: bool = True) -> Peer:
        """Return the peer behind a bootstrap address, in any state; if unknown, make it and begin to look it up.

        ``want``: open the direction in which the peer sends KV here. Without it the peer only exchanges messages.
        """
        peer = self.table.by_address.get((host, port))
        if peer is None:
            peer = Peer(PeerState.FINDING, host=host, port=port)
            self.table.by_address[(host, port)] = peer
            self._find(host, port)
        if want:
            self.want(peer, now)
        return peer

    def close(self, reason: str) -> None:
        """Disconnect all peers. New ones are refused for ``reason`` until ``closed`` is None again.

        ``reason`` is also logged, and is the error of requests that need one of the peers.
        """
        self.closed = reason
        for peer in list(self.table.all()):
            self._gone(peer, f"this instance parts from all others: {reason}")

    def want(self, peer: Peer, now: float) -> None:
        """Have the direction opened in which the peer sends KV here, unless it is open; that takes some ticks."""
        self._directions.want(peer, now)

    def on_found(self, host: str, port: int, answer: Reached | str, now: float) -> None:
        """Dial the instance of a bootstrap server's answer, or use its peer. A text is an error: the peer is gone."""
        peer = self.table.by_address.get((host, port))
        if peer is None or peer.state is not PeerState.FINDING:
            return
        if isinstance(answer, str):
            self._gone(peer, f"the bootstrap server {host}:{port} gave no registration: {answer}")
            return
        epoch = answer.registration.epoch
        if epoch == self._local.epoch:
            self._gone(peer, f"the bootstrap server {host}:{port} is this instance's own", 400)
            return
        known = self.table.known(epoch)
        if known is not None and known.pool != answer.registration.pool:
            if known.registered or self._port.is_sealed:
                # Any stranger may run a bootstrap server, and other instances' registrations are no secret.
                self._gone(peer, f"the bootstrap server {host}:{port} names an instance that is connected as another")
                return
            self._gone(known, "it said Hello in the name of an instance that it is not")
            known = None
        if known is not None:
            known.registered = True
            peer.same_as = self.table.by_address[(host, port)] = known
            if peer.reading is not Reading.CLOSED:
                self.want(known, now)
            return
        peer.epoch, peer.pool, peer.registered = epoch, answer.registration.pool, True
        self._dial(peer, answer, now)

    def poll(self, now: float) -> None:
        """Read messages, advance peers, drop silent ones and send due heartbeats."""
        for identity, message in read_messages(self._port):
            self._take(identity, message, now)
        self._settle(now)
        for peer in list(self.table.by_connection.values()):
            if now - peer.heard_at > self._timeout:
                self._lost(peer, f"it was silent for {now - peer.heard_at:.1f} s", now)
            else:
                self._advance(peer, now)
        if now - self._beat_at >= self._interval:
            self._beat_at = now
            # Peers that wait for their Welcome get one, too: connecting workers may take longer than a heartbeat.
            for peer in self.table.by_connection.values():
                peer.send(Heartbeat(peer.epoch))

    def flush(self) -> None:
        """Send the messages for peers that this tick has queued."""
        for peer in self.table.by_connection.values():
            self._flush(peer)

    def on_event(self, event: PeerEvent, now: float) -> None:
        """Handle the worker's report on a data link: take the next step in opening it, or end its peer."""
        if isinstance(event, PeerLinkDown):
            self._on_link_down(event)
            return
        for peer in self.table.linked(event.link):
            if isinstance(event, PeerFailed):
                peer.send(Refused(peer.epoch, shown(event.error, REASON_CHARS)))
                self._gone(peer, f"the workers can't reach each other: {event.error}")
            elif isinstance(event, PeerAdmitted) and self._directions.on_admitted(peer):
                self._advance(peer, now)
            elif isinstance(event, PeerConnected):
                self._directions.on_connected(peer)

    @property
    def refused(self) -> int:
        """Number of frames, messages and Hellos refused since the start."""
        return self._refusals.total

    # --- connecting and greeting ---

    def _dial(self, peer: Peer, reached: Reached, now: float) -> None:
        peer.state, peer.heard_at, peer.number = PeerState.GREETING, now, next(self._numbers)
        try:
            identity = self._port.dial(reached.address, reached.registration.control_port)
        except (OSError, ValueError) as e:
            self._gone(peer, f"its control port can't be connected to: {e}")
            return
        self._join(peer, identity, dialling=True)

    def _join(self, peer: Peer, identity: int, *, dialling: bool) -> None:
        """Assign the connection to ``peer`` and queue our Hello, with metadata if this instance is ``dialling``."""
        peer.connection = identity
        self.table.by_connection[identity] = peer
        peer.unsent = [self._local.hello(peer.epoch, peer.number, dialling=dialling)]

    def _settle(self, now: float) -> None:
        """Handle connections that have ended since the last call."""
        for identity, reason in self._port.take_ended():
            if identity in self.table.by_connection:
                self._lost(self.table.by_connection[identity], reason, now)

    def _lost(self, peer: Peer, reason: str, now: float, status: int = 503) -> None:
        """Handle a lost or refused connection: end the peer, or use the one that it made while we dialled it."""
        if peer.state is not PeerState.GREETING or peer.spare is None:
            self._gone(peer, reason, status)
            return
        self._leave_connection(peer)
        self._accept(peer, peer.spare.connection, peer.spare.hello, now)

    def _greet(self, identity: int, hello: Hello, now: float) -> None:
        own = self.table.by_connection.get(identity)
        problem = self._local.problem(hello)
        if own is not None:
            self._answered(own, hello, problem, now)
            return
        status = 503 if problem is None and self.closed is not None else 409
        problem = problem or self.closed or self._intrusion(hello)
        if problem is not None:
            self._refusals.add(f"refused instance {hello.sender}: {problem}")
            self._port.send(identity, [Refused(hello.sender, shown(problem, REASON_CHARS), status)])
            return
        peer = self.table.known(hello.sender)
        if peer is not None and peer.state is PeerState.GREETING:
            if self._local.epoch < hello.sender:
                # Both have dialled, and our connection stands if it succeeds. The peer then closes this one.
                peer.spare = Spare(identity, hello)
                self._settle(now)
                return
            self._leave_connection(peer)
        elif peer is not None:
            if (
                peer.hello is not None and hello.link <= peer.hello.link
            ):  # an earlier attempt, which the peer has abandoned
                self._port.drop(identity)
                return
            self._gone(peer, "it connected anew")
            peer = None
        if peer is None:
            pool = digest(hello.metadata)
            peer = Peer(PeerState.GREETING, number=next(self._numbers), epoch=hello.sender, pool=pool)
        self._accept(peer, identity, hello, now)

    def _accept(self, peer: Peer, identity: int, hello: Hello, now: float) -> None:
        """Open ``peer`` on a connection that it has made, and queue our Hello in answer to its ``hello``."""
        self._port.keep(identity)
        self._join(peer, identity, dialling=False)
        self._open(peer, hello, now)

    def _answered(self, peer: Peer, hello: Hello, problem: str | None, now: float) -> None:
        """Open ``peer``, which said Hello on its connection, or end it. ``problem``: what is wrong with the Hello."""
        if peer.state is PeerState.OPEN:
            self._gone(peer, "it said Hello twice by one connection")
        elif problem is None and hello.sender != peer.epoch:
            self._gone(peer, "another instance answers at its control port")
        elif problem is not None:
            self._gone(peer, f"this instance can't exchange KV with it: {problem}", 409)
        else:
            self._open(peer, hello, now)

    def _open(self, peer: Peer, hello: Hello, now: float) -> None:
        peer.state, peer.hello, peer.heard_at, peer.spare = PeerState.OPEN, hello, now, None
        peer.wanted_at = now
        self._advance(peer, now)

    def _intrusion(self, hello: Hello) -> str | None:
        """Return why this Hello may not open or replace a peer, or None if it may."""
        peer = self.table.known(hello.sender)
        if peer is not None:
            known = hmac.compare_digest(peer.pool, digest(hello.metadata))
            return None if known else "an instance of this epoch is connected, with another data port"
        if len(self.table.by_connection) >= MAX_PEERS:
            return f"{MAX_PEERS} instances are connected, which is the most; use another one"
        return None

    def _advance(self, peer: Peer, now: float) -> None:
        problem = self._directions.advance(peer, now, is_last_down=not self.table.is_closing(peer.epoch))
        if problem is not None:
            self._gone(peer, problem)

    # --- messages from peers ---

    def _take(self, identity: int, message: Any, now: float) -> None:
        peer = self.table.by_connection.get(identity)
        if peer is not None:
            peer.heard_at = now
        if isinstance(message, Hello):
            self._greet(identity, message, now)
        elif message.epoch != self._local.epoch:
            self._refusals.add(f"dropped {type(message).__name__} for epoch {message.epoch}, which is not this one's")
        elif isinstance(message, Heartbeat):
            return
        elif peer is None:
            self._refusals.add(f"dropped {type(message).__name__} of an instance that is not connected")
        elif isinstance(message, Refused):
            self._lost(peer, f"it refused this instance: {shown(message.reason)}", now, message.status)
        elif peer.state is PeerState.OPEN and isinstance(message, Invite | Welcome):
            if self._directions.on_message(peer, message):
                self._advance(peer, now)
        elif peer.state is PeerState.OPEN and self._rights.may_send(peer, message):
            self._owner.on_message(peer, message, now)
        elif peer.state is PeerState.OPEN and isinstance(message, MoveOffer) and not self._rights.takes_moves:
            peer.send(MoveRefused(peer.epoch, message.handover, NO_MOVES))
        else:
            self._refusals.add(f"dropped {type(message).__name__} of instance {peer.epoch}, which may not send it now")

    # --- the end ---

    def _on_link_down(self, event: PeerLinkDown) -> None:
        """End the peer of a data link that is down. If it is gone already, its pages are safe now."""
        for peer in self.table.linked(event.link):
            peer.down = True
            self._gone(peer, "its worker closed the data link or died")
        for peer in [p for p in self.table.closing if p.number == event.link]:
            peer.down = True
            self.table.closing.remove(peer)
            self._owner.on_down(peer)

    def _gone(self, peer: Peer, reason: str, status: int = 503) -> None:
        if peer.gone:
            return
        text = f"{peer} is gone: {reason}"
        if peer.host or peer.readable or peer.writable:
            log.warning("%s", shown(text, REASON_CHARS))
        else:
            self._refusals.add(text)
        peer.state, peer.status, peer.reason = PeerState.GONE, status, reason
        self.table.forget_addresses(peer)
        self._flush(peer)
        self._leave_connection(peer)
        if not peer.down:
            self.table.closing.append(peer)
            self._to_worker(DisconnectPeer(peer.epoch, peer.number))
        self._owner.on_gone(peer)

    def _leave_connection(self, peer: Peer) -> None:
        if peer.connection is not None:
            self.table.by_connection.pop(peer.connection, None)
            self._port.drop(peer.connection)

    def _flush(self, peer: Peer) -> None:
        if not peer.unsent or peer.connection is None:
            return
        unsent, peer.unsent = peer.unsent, []
        for message in self._port.send(peer.connection, unsent):
            self._owner.on_too_long(peer, message)


METRICS: Metrics[Peers] = (
    gauge("pdserve_handover_peers", "Instances that are connected to exchange KV.", lambda p: p.table.connected),
    counter(
        "pdserve_control_refusals_total",
        "Frames and connections that the control plane refused.",
        lambda p: p.refused,
    ),
)
