"""Common base of the backends with a socket for each link: listening, greetings, link states and waiting for I/O.

The states of a pair are those of ``base.py``. All sockets are non-blocking and are watched by one reactor.

Strangers can reach the listener. They can send bad bytes, reset a connection at any moment or exhaust descriptors, but
the only effect is the end of their own connection. At most ``MAX_STRANGERS`` may wait at once. One more ends the one
that has waited longest, since an honest writer sends its greeting at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ....mem_cache.kv_pages.page_group import PageGroup
from ....mem_cache.kv_pages.region import RegionError
from ....runtime.refusal_log import RefusalLog
from ...errors import BadMetadata, BadPages, LinkLost, NotConnected, PeerUnreachable, TransferError
from ...wire.listener import Listener
from ...wire.reactor import Reactor
from ..page_write import PageWrite, check_pages
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
from .handshake import Greeting, Offer, OfferedGroup, Verdict
from .link import IncomingLink, Link, LinkPhase, OutgoingLink

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
"""Default time limit of ``connect``, in seconds."""
STALL_SECONDS = 10.0
"""Default time in seconds that a peer may be silent while it owes us bytes."""
MAX_STRANGERS = 64
"""Maximum number of open connections that have not sent a greeting."""
MAX_FENCED = 1 << 16
"""Maximum number of remembered epochs with links that went down. The oldest are forgotten, long after any use."""


@dataclass(eq=False)
class _Peer:
    """The links with one epoch."""

    outgoing: OutgoingLink | None = None
    incoming: IncomingLink | None = None
    reason: str | None = None
    """Why the links are going down. None before that."""
    admit_next: bool = False
    """Whether to admit the peer after ``LinkDown``."""
    connect_next: bytes | None = None
    """Metadata for connecting to the peer after ``LinkDown``. None: don't connect."""
    next_deadline: float | None = None
    """Latest time at which the ``LinkDown`` must come before ``admit_next`` and ``connect_next`` fail."""


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
        self._peers: dict[str, _Peer] = {}
        self._fenced: dict[str, None] = {}
        self._links: set[Link] = set()
        self._events: list[LinkEvent] = []
        self._reactor = Reactor()
        self._listener: Listener | None = None
        self._refusals = RefusalLog(log, "at the data port")

    # Differences between the backends

    @abstractmethod
    def _listen(self) -> tuple[socket.socket, Offer]:
        """Return a listening socket and the ``_offer`` that describes it. Raises ``RegionError`` and ``OSError``."""

    @abstractmethod
    def _dial(self, offer: Offer) -> OutgoingLink:
        """Start to connect. Raises ``OSError`` and ``TransferError``."""

    @abstractmethod
    def _unreachable(self, offer: Offer, reason: str) -> str:
        """Return the error message for users after dialling failed because of ``reason``."""

    @abstractmethod
    def _accepted(self, sock: socket.socket) -> IncomingLink:
        """Return the link of an accepted connection. Raises ``LinkLost`` if it is refused."""

    def _advance(self) -> None:
        """Advance work that does not depend on our own sockets."""

    def _noticed(self, data: object) -> None:
        """Handle an event of something other than a link that a backend has the reactor watch."""

    def _send_welcome(self, link: IncomingLink, data: bytes) -> None:
        link.stream.send([data])

    def _offer(self, place: str, port: int = 0, host_id: str = "", *, streams: bool = False) -> Offer:
        groups = [OfferedGroup(group.num_pages, group.page_bytes, group.num_layers) for group in self.groups]
        return Offer(self.name, self.epoch, self._secret, groups, place, port, host_id, streams)

    # TransferBackend

    def register(self, groups: Sequence[PageGroup]) -> bytes:
        if not self.reaches_devices and any(group.direct is not None for group in groups):
            raise RegionError(
                f"the {self.name} backend does not reach the memory of a GPU: have KV pass through the host's "
                "(leave out --kv-staging-size 0), or use the nixl or cuda_ipc backend"
            )
        for group in groups:
            nbytes, page_bytes = group.region.nbytes, group.page_bytes
            if page_bytes <= 0 or nbytes % page_bytes or page_bytes % group.num_layers:
                raise RegionError(f"the KV region of {nbytes} bytes is not made of pages of {page_bytes} bytes")
        self.groups = list(groups)
        try:
            sock, offer = self._listen()
        except OSError as e:
            place = f"{self.host}:{self.port}" if self.port else self.host
            raise RegionError(
                f"can't listen for KV transfers on {place}: {e.strerror}. Check --host and --disaggregation-data-port."
            ) from e
        self._listener = Listener(sock, self._reactor, self._refusals)
        return msgspec.msgpack.encode(offer)

    def connect(self, peer: str, metadata: bytes) -> None:
        record = self._peers.setdefault(peer, _Peer())
        if record.reason is not None:
            record.connect_next = metadata
            record.next_deadline = time.monotonic() + self.handshake_seconds
            return
        self._fenced.pop(peer, None)
        if record.outgoing is not None:
            if record.outgoing.phase is LinkPhase.OPEN:
                self._events.append(LinkUp(peer))
            return
        try:
            offer = handshake.decode_offer(metadata, self.name, peer)
            self._compare(offer)
            link = self._try_dial(offer)
        except TransferError as e:
            self._connect_failed(peer, str(e))
            return
        record.outgoing = link
        self._adopt(link)
        self._reactor.watch(link.stream.sock, link, read=False, write=True)

    def admit(self, peer: str) -> None:
        record = self._peers.get(peer)
        if record is not None and record.reason is not None:
            record.admit_next = True
            record.next_deadline = time.monotonic() + self.handshake_seconds
            return
        self._fenced.pop(peer, None)
        self._events.append(Admitted(peer))

    def write(self, pages: PageWrite) -> WriteHandle:
        peer = pages.handover.epoch
        record = self._peers.get(peer)
        link = record.outgoing if record is not None else None
        if link is None or link.phase is not LinkPhase.OPEN:
            raise NotConnected(f"peer {peer} is not connected")
        self._check(pages, link.offer)
        handle = link.write(pages)
        self._rewatch(link)
        return handle

    def _check(self, pages: PageWrite, offer: Offer) -> None:
        """Raise ``BadPages`` for pages, groups or layers that either pool does not have."""
        if len(pages.src) != len(pages.dst) or not len(pages.src):
            raise BadPages(f"{len(pages.src)} pages here for {len(pages.dst)} of peer {offer.epoch}")
        if not 0 <= pages.group < len(self.groups):
            raise BadPages(f"there is no page group {pages.group}")
        group = self.groups[pages.group]
        if not 0 <= pages.layers.begin < pages.layers.end <= group.num_layers:
            raise BadPages(f"a page has {group.num_layers} layers, none of {pages.layers.begin} … {pages.layers.end}")
        check_pages(pages.src, group.num_sources, "source")
        check_pages(pages.dst, offer.groups[pages.group].num_pages, "destination")

    def poll(self, handle: WriteHandle) -> WriteState:
        return handle.state

    def disconnect(self, peer: str) -> None:
        record = self._peers.get(peer)
        if record is not None and (record.admit_next or record.connect_next is not None):
            self._give_up_next(peer, record, "disconnected on request")
        self._part(peer, "disconnected on request")

    def progress(self, timeout: float | None) -> list[LinkEvent]:
        for data, readable, writable in self._reactor.wait(self._until_deadline(timeout)):
            if isinstance(data, Link):
                self._serve(data, readable, writable)
            elif data is self._listener:
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
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._reactor.close()

    # Time

    def _until_deadline(self, timeout: float | None) -> float | None:
        """Return the longest time to wait, in seconds: ``timeout`` or the next deadline."""
        if self._events:
            return 0.0
        due = [link.deadline for link in self._links] + [record.next_deadline for record in self._peers.values()]
        due.append(self._listener.listen_again if self._listener is not None else None)
        times = [t for t in due if t is not None]
        if not times:
            return timeout
        left = max(0.0, min(times) - time.monotonic())
        return left if timeout is None else min(left, timeout)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if self._listener is not None:
            self._listener.check(now)
        for link in list(self._links):
            if link.phase is not LinkPhase.CLOSED and link.deadline is not None and link.deadline <= now:
                seconds = self.stall_seconds if link.phase is LinkPhase.OPEN else self.handshake_seconds
                why = "wants to write pages that it was not asked for" if link.paused else "does not answer"
                self._lost(link, f"the peer {why} (for {seconds:g} s)")
        for peer, record in self._peers.items():
            if record.next_deadline is not None and record.next_deadline <= now:
                error = f"peer {peer} still has access to this pool from before; its process must let go or end first"
                self._give_up_next(peer, record, error)

    def _give_up_next(self, peer: str, record: _Peer, why: str) -> None:
        """Cancel what was to begin after the ``LinkDown`` that is under way, and report it as failed."""
        record.admit_next, record.connect_next, record.next_deadline = False, None, None
        self._events.append(ConnectFailed(peer, why))

    # Greetings

    def _compare(self, offer: Offer) -> None:
        """Raise ``BadMetadata`` if the peer's pages differ from ours in bytes or layers."""
        ours = [(group.page_bytes, group.num_layers) for group in self.groups]
        theirs = [(group.page_bytes, group.num_layers) for group in offer.groups]
        if ours != theirs:
            raise BadMetadata(f"peer {offer.epoch} has pages of other bytes and layers, {theirs} where ours are {ours}")

    def _try_dial(self, offer: Offer) -> OutgoingLink:
        try:
            return self._dial(offer)
        except OSError as e:
            raise PeerUnreachable(self._unreachable(offer, e.strerror or str(e))) from e

    def _dialled(self, link: OutgoingLink) -> None:
        """Send our greeting on a connection that was dialled. Raises ``LinkLost`` if dialling failed."""
        error = link.stream.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise LinkLost(self._unreachable(link.offer, os.strerror(error)))
        link.phase = LinkPhase.GREETING
        greeting = Greeting(handshake.WIRE_VERSION, self.epoch, link.offer.epoch, link.offer.secret)
        link.stream.send([handshake.frame(greeting)])
        self._read_body(link, lambda body: self._on_verdict(link, body), handshake.MAX_BODY + handshake.MAX_MEANS)

    def _on_verdict(self, link: OutgoingLink, body: bytearray) -> None:
        verdict = handshake.decode_verdict(body)
        if verdict.error:
            raise LinkLost(f"peer {link.peer} refused the link: {verdict.error}")
        link.opened()
        link.welcomed(verdict.means)
        link.phase = LinkPhase.OPENING
        self._open_if_ready(link)

    def _open_if_ready(self, link: OutgoingLink) -> None:
        if link.is_ready():
            link.phase = LinkPhase.OPEN
            self._events.append(LinkUp(link.peer))

    def _accept(self) -> None:
        assert self._listener is not None
        sock = self._listener.accept()
        if sock is None:
            return
        self._end_oldest_stranger()
        try:
            link = self._accepted(sock)
            self._reactor.watch(sock, link, read=True, write=False)
        except (LinkLost, OSError) as e:  # a connection that was reset already can't be set up
            self._refusals.add(f"refused a connection: {e}")
            sock.close()
            return
        self._adopt(link)
        self._read_body(link, lambda body: self._on_greeting(link, body))

    def _end_oldest_stranger(self) -> None:
        strangers = [k for k in self._links if isinstance(k, IncomingLink) and k.phase is LinkPhase.GREETING]
        if len(strangers) >= MAX_STRANGERS:
            oldest = min(strangers, key=lambda link: link.handshake_deadline or 0.0)
            self._lost(oldest, f"{MAX_STRANGERS} others have yet to introduce themselves")

    def _on_greeting(self, link: IncomingLink, body: bytearray) -> None:
        greeting = handshake.decode_greeting(body)
        error = handshake.judge(greeting, self.epoch, self._secret) or self._why_not(greeting.writer)
        if error:
            # This few bytes always fit into the buffer of a new connection. A connection that is gone needs no answer.
            with contextlib.suppress(OSError):
                link.stream.sock.send(handshake.frame(Verdict(error)))
            raise LinkLost(f"refused {greeting.writer or 'a writer'}: {error}")
        link.peer = greeting.writer
        means = link.welcome()
        link.phase = LinkPhase.OPEN
        self._peers.setdefault(link.peer, _Peer()).incoming = link
        self._send_welcome(link, handshake.frame(Verdict(means=means)))
        link.opened()

    def _why_not(self, writer: str) -> str:
        """Return why a writer with a valid greeting may not write now, or ""."""
        record = self._peers.get(writer)
        if record is not None and record.incoming is not None and record.reason is None:
            # The writer lost its link, and we had not noticed yet. Our LinkDown must come before it may write again.
            self._lost(record.incoming, "the peer opened another link")
        return "its link went down; this instance has to register with it again" if writer in self._fenced else ""

    def _read_body(self, link: Link, then: Callable[[bytearray], None], most: int = handshake.MAX_BODY) -> None:
        prefix = bytearray(handshake.LENGTH.size)

        def on_prefix() -> None:
            body = bytearray(handshake.body_length(prefix, most))
            link.stream.read([memoryview(body)], lambda: then(body))

        link.stream.read([memoryview(prefix)], on_prefix)

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
        """Do a link's I/O. A failure ends only the links with this peer."""
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
        """Call ``do`` for a link, and send what it queues. End the link on ``LinkLost``."""
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
        """End a link that is gone or must end. If it was open, end the one in the other direction, too."""
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
        """Close both links with ``peer``, as far as this side can. ``LinkDown`` follows when both are down."""
        record = self._peers.setdefault(peer, _Peer())
        self._fenced[peer] = None
        if len(self._fenced) > MAX_FENCED:
            del self._fenced[next(iter(self._fenced))]
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
