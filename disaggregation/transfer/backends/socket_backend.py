"""Common base of the backends with a socket for each link: listening, greetings, link states and waiting for I/O.

The states of a pair are those of ``base.py``. All sockets are non-blocking and are watched by one reactor.

Strangers can reach the listener. They can send bad bytes, reset a connection at any moment or exhaust descriptors, but
the only effect is the end of their own connection. At most ``MAX_STRANGERS`` may wait at once. One more ends the one
that has waited longest, since an honest writer sends its greeting at once.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence

import msgspec

from ....mem_cache.kv_pages.page_group import PageGroup
from ....runtime.refusal_log import RefusalLog
from ...errors import LinkLost, NotConnected, TransferError
from ...wire.listener import Listener
from ...wire.reactor import Reactor
from ..page_write import PageWrite
from . import handshake
from .base import (
    Admitted,
    ConnectFailed,
    LinkDown,
    LinkEvent,
    LinkUp,
    TransferBackend,
    WriteHandle,
    WriteState,
)
from .greetings import greet, read_greeting
from .handshake import GreetingAnswer, Offer
from .link import IncomingLink, Link, LinkPhase, OutgoingLink, one_too_many, seconds_left
from .offered_groups import check_no_devices, check_offer, check_regions, check_write, offered
from .peer_links import FencedEpochs, PeerLinks
from .writer_port import WriterPort

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
"""Default time limit of ``connect``, in seconds."""
STALL_SECONDS = 10.0
"""Default time in seconds that a peer may be silent while it owes us bytes."""
MAX_STRANGERS = 64
"""Maximum number of open connections that have not sent a greeting."""


class SocketBackend(TransferBackend):
    """Base class of backends with a socket for each link.

    ``handshake_seconds`` limits ``connect``. ``stall_seconds`` limits the silence of a peer that owes us bytes.
    """

    name: str
    reaches_devices = False
    """Whether the backend can move pages of a ``direct`` pool, which is on a device."""

    def __init__(
        self,
        epoch: str,
        host: str,
        port: int = 0,
        advertise_host: str | None = None,
        *,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self.epoch = epoch
        self.host = host
        self.port = port
        self.advertise_host = advertise_host
        self.handshake_seconds = handshake_seconds
        self.stall_seconds = stall_seconds
        self.groups: list[PageGroup] = []
        self._secret = secrets.token_bytes(16)
        self._peers: dict[str, PeerLinks] = {}
        self._fenced = FencedEpochs()
        self._links: set[Link] = set()
        self._events: list[LinkEvent] = []
        self._reactor = Reactor()
        self._refusals = RefusalLog(log, "at the data port")
        self._port = WriterPort(self._reactor, self._refusals)

    # Differences between the backends

    @abstractmethod
    def _listen(self) -> tuple[socket.socket, Offer]:
        """Open the listener, and return it with its offer to peers. Raises ``RegionError`` and ``OSError``."""

    @abstractmethod
    def _dial(self, offer: Offer) -> OutgoingLink:
        """Start to connect, and return the link, in phase DIALLING. Raises ``OSError`` and ``TransferError``."""

    @abstractmethod
    def _unreachable(self, offer: Offer, reason: str) -> str:
        """Return the error message for users after dialling failed because of ``reason``."""

    @abstractmethod
    def _accepted(self, sock: socket.socket) -> IncomingLink:
        """Make the link of an accepted connection. Raises ``LinkLost`` if the connection is refused."""

    def _advance(self) -> None:
        """Advance work that does not depend on our own sockets, once in each ``progress``. Here there is none."""

    def _noticed(self, data: object) -> None:
        """Handle an event of a watched descriptor that is no link's, known by ``data``. The base class has none."""

    def _send_welcome(self, link: IncomingLink, data: bytes) -> None:
        link.stream.send([data])

    def _offer(self, place: str, port: int = 0, host_id: str = "", *, streams: bool = False) -> Offer:
        return Offer(self.name, self.epoch, self._secret, offered(self.groups), place, port, host_id, streams)

    # TransferBackend

    def register(self, groups: Sequence[PageGroup]) -> bytes:
        if not self.reaches_devices:
            check_no_devices(groups, self.name)
        check_regions(groups)
        self.groups = list(groups)
        return msgspec.msgpack.encode(self._port.open(self._listen, self.host, self.port))

    def connect(self, peer: str, metadata: bytes) -> None:
        record = self._peers.setdefault(peer, PeerLinks())
        if record.reason is not None:
            record.connect_later(metadata, time.monotonic() + self.handshake_seconds)
            return
        self._fenced.discard(peer)
        if record.outgoing is not None:
            if record.outgoing.phase is LinkPhase.OPEN:
                self._events.append(LinkUp(peer))
            return
        try:
            offer = handshake.decode_offer(metadata, self.name, peer)
            check_offer(offer, self.groups)
            link = self._dial(offer)
        except (TransferError, OSError) as e:
            reason = self._unreachable(offer, e.strerror or str(e)) if isinstance(e, OSError) else str(e)
            self._connect_failed(peer, reason)
            return
        record.outgoing = link
        self._adopt(link)
        self._reactor.watch(link.stream.sock, link, read=False, write=True)

    def admit(self, peer: str) -> None:
        record = self._peers.get(peer)
        if record is not None and record.reason is not None:
            record.admit_later(time.monotonic() + self.handshake_seconds)
            return
        self._fenced.discard(peer)
        self._events.append(Admitted(peer))

    def write(self, pages: PageWrite) -> WriteHandle:
        peer = pages.handover.epoch
        link = self._peers[peer].outgoing if peer in self._peers else None
        if link is None or link.phase is not LinkPhase.OPEN:
            raise NotConnected(f"peer {peer} is not connected")
        check_write(pages, self.groups, link.offer)
        handle = link.write(pages)
        self._rewatch(link)
        return handle

    def poll(self, handle: WriteHandle) -> WriteState:
        return handle.state

    def disconnect(self, peer: str) -> None:
        record = self._peers.get(peer)
        if record is not None and record.has_next:
            self._give_up_next(peer, record, "disconnected on request")
        self._part(peer, "disconnected on request")

    def progress(self, timeout: float | None) -> list[LinkEvent]:
        for data, readable, writable in self._reactor.wait(self._until_deadline(timeout)):
            if isinstance(data, Link):
                self._serve(data, readable, writable)
            elif isinstance(data, Listener):
                self._accept()
            else:
                self._noticed(data)
        self._advance()
        self._check_deadlines()
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        self._reactor.wake()

    def close(self) -> None:
        for link in list(self._links):
            self._close_link(link, "this instance is shutting down")
        self._peers.clear()
        self._port.close()
        self._reactor.close()

    # Time

    def _until_deadline(self, timeout: float | None) -> float | None:
        """Return how many seconds to wait for I/O: until the next deadline, at most ``timeout``; None for no limit."""
        if self._events:
            return 0.0
        due = [link.deadline for link in self._links] + [record.next_deadline for record in self._peers.values()]
        return seconds_left([*due, self._port.listen_again], timeout)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        self._port.check(now)
        for link in list(self._links):
            if (why := link.overdue(now, self.handshake_seconds, self.stall_seconds)) is not None:
                self._lost(link, why)
        for peer, record in self._peers.items():
            if record.next_deadline is not None and record.next_deadline <= now:
                error = f"peer {peer} still has access to this pool from before; its process must let go or end first"
                self._give_up_next(peer, record, error)

    def _give_up_next(self, peer: str, record: PeerLinks, why: str) -> None:
        """Drop what was to begin after the awaited ``LinkDown`` of ``peer``, and report it as ``ConnectFailed``."""
        record.drop_next()
        self._events.append(ConnectFailed(peer, why))

    # Greetings

    def _dialled(self, link: OutgoingLink) -> None:
        """Send our greeting on a connection that is made. Raises ``LinkLost`` if connecting has failed."""
        if error := link.stream.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise LinkLost(self._unreachable(link.offer, os.strerror(error)))
        greet(link, self.epoch, lambda: self._open_if_ready(link))

    def _open_if_ready(self, link: OutgoingLink) -> None:
        if link.is_ready():
            link.phase = LinkPhase.OPEN
            self._events.append(LinkUp(link.peer))

    def _accept(self) -> None:
        link = self._port.accept(self._accepted, self._end_stranger)
        if link is not None:
            self._adopt(link)
            read_greeting(link, self.epoch, self._secret, self._why_not, lambda means: self._on_greeted(link, means))

    def _end_stranger(self) -> None:
        if (stranger := one_too_many(self._links, MAX_STRANGERS)) is not None:
            self._lost(stranger, f"{MAX_STRANGERS} others have yet to introduce themselves")

    def _on_greeted(self, link: IncomingLink, means: bytes) -> None:
        self._peers.setdefault(link.peer, PeerLinks()).incoming = link
        self._send_welcome(link, handshake.frame(GreetingAnswer(means=means)))
        link.opened()

    def _why_not(self, writer: str) -> str:
        """Return why a greeted writer may not write now, or "". If it has an open link, that one is ended first."""
        record = self._peers.get(writer)
        if record is not None and record.incoming is not None and record.reason is None:
            # The writer lost its link, and we had not noticed yet. Our LinkDown must come before it may write again.
            self._lost(record.incoming, "the peer opened another link")
        return "its link went down; this instance has to register with it again" if writer in self._fenced else ""

    # Link life

    def _adopt(self, link: Link) -> None:
        link.handshake_deadline = time.monotonic() + self.handshake_seconds
        self._links.add(link)

    def _rewatch(self, link: Link) -> None:
        if link.paused:
            self._reactor.forget(link.stream.sock)
        else:
            self._reactor.watch(link.stream.sock, link, read=True, write=link.stream.sending)

    def _serve(self, link: Link, readable: bool, writable: bool) -> None:
        """Send and receive on a link's socket. A failure ends the links with this peer, and no others."""
        if link.phase is LinkPhase.CLOSED:
            return  # closed by another link's event in the same round
        try:
            if link.phase is LinkPhase.DIALLING and isinstance(link, OutgoingLink):
                self._dialled(link)
            if readable:
                link.stream.on_readable()
            if writable:
                link.stream.on_writable()
        except LinkLost as e:
            self._lost(link, str(e))
        except OSError as e:  # the other side may reset the socket between any two calls
            self._lost(link, f"the connection broke: {e.strerror}")
        else:
            self._rewatch(link)

    def _carry_on(self, link: Link, do: Callable[[], None]) -> None:
        """Call ``do``, which continues work on a link, and send what it queues. End the link on ``LinkLost``."""
        try:
            do()
            if link.stream.sending:
                link.stream.on_writable()
        except LinkLost as e:
            self._lost(link, str(e))
        else:
            self._rewatch(link)

    def _close_link(self, link: Link, reason: str) -> None:
        link.phase = LinkPhase.CLOSED
        self._links.discard(link)
        self._reactor.forget(link.stream.sock)
        link.stream.close()
        link.closed(reason)

    def _lost(self, link: Link, reason: str) -> None:
        """End a link. If it was open, end the other direction, too; else report ``ConnectFailed`` if outgoing."""
        was_open = link.phase is LinkPhase.OPEN
        if isinstance(link, IncomingLink) and not was_open:
            self._refusals.add(f"a connection ended before it was welcome: {reason}")
            self._close_link(link, reason)
            return
        record = self._peers[link.peer]
        if link is record.outgoing and not was_open:
            record.outgoing = None
            self._close_link(link, reason)
            self._connect_failed(link.peer, reason)
            return
        if link is record.incoming:
            record.incoming = None
            self._close_link(link, reason)
        self._part(link.peer, reason)

    def _connect_failed(self, peer: str, error: str) -> None:
        record = self._peers[peer]
        if record.incoming is None and record.outgoing is None and record.reason is None:
            del self._peers[peer]
        self._events.append(ConnectFailed(peer, error))

    def _part(self, peer: str, reason: str) -> None:
        """Close both links with ``peer``; refuse new ones until it is admitted. ``LinkDown`` once both are down."""
        record = self._peers.setdefault(peer, PeerLinks())
        self._fenced.add(peer)
        record.reason = record.reason or reason
        outgoing, record.outgoing = record.outgoing, None
        if outgoing is not None:
            if outgoing.phase is not LinkPhase.OPEN:
                self._events.append(ConnectFailed(peer, reason))
            self._close_link(outgoing, reason)
        if record.incoming is not None:
            if not record.incoming.let_go():
                return
            self._close_link(record.incoming, reason)
        del self._peers[peer]
        self._events.append(LinkDown(peer, record.reason))
        if record.admit_next:
            self.admit(peer)
        if record.connect_next is not None:
            self.connect(peer, record.connect_next)
