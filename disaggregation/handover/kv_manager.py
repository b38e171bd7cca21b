"""The scheduler's door to disaggregation: one object for every hand-over of an instance, in both directions.

A prefill instance has senders and a control socket that decodes connect to; a decode instance has receivers and links
to prefills. All of it runs inside the scheduler's loop: ``poll`` once a turn, never blocking. What must block (asking
bootstrap servers, renewing leases) runs in small threads, whose results come back through a mailbox that wakes the
loop.
"""

from __future__ import annotations

import logging
from typing import Any

import zmq

from ...mem_cache.base_prefix_cache import KVHold
from ...messages.handover import Abort, AbortAck, RoomQueued, TransferDone, TransferFailed, TransferRequest
from ...messages.metrics import HandoverCounts
from ...messages.outputs import TokenLogprob
from ...messages.worker import PagesVerified, PeerConnected, PeerLinkDown, SendEnded, TransferEvent
from ...runtime.child import ChildContext
from ...scheduler.req import Req
from ...scheduler.scheduler import Scheduler
from ..bootstrap.finder import RegistrationFinder
from ..bootstrap.lease import LeaseKeeper
from ..bootstrap.registration import Reached, Registration
from ..wire.reactor import Reactor
from .control.server import ControlServer
from .decode_peers import DecodePeer, DecodePeers
from .kv_receiver import KVReceivers
from .kv_sender import KVSenders
from .limits import HandoverLimits
from .mailbox import Mailbox
from .prefill_link import PrefillLink
from .prefill_links import PrefillLinks
from .scheduler_host import SchedulerHost

log = logging.getLogger(__name__)

IDLE_TIMEOUT_MS = 1000
LEASE_SECONDS = 6.0


class KVManager:
    """See the module."""

    def __init__(self, ctx: ChildContext, scheduler: Scheduler, poller: zmq.Poller) -> None:
        options = ctx.options
        host = SchedulerHost(scheduler, ctx.epoch)
        limits = HandoverLimits.of(options)
        heartbeat = (options.disaggregation_heartbeat_interval, options.disaggregation_heartbeat_timeout)
        backend = options.disaggregation_transfer_backend
        self._ctx = ctx
        self._options = options
        self._scheduler = scheduler
        self._interval_ms = int(options.disaggregation_heartbeat_interval * 1000)
        self._mailbox: Mailbox[tuple[str, int, Reached | str]] = Mailbox()
        poller.register(self._mailbox.fileno(), zmq.POLLIN)
        self._lease: LeaseKeeper | None = None
        self.senders: KVSenders | None = None
        self.receivers: KVReceivers | None = None
        self._peers: DecodePeers | None = None
        self._links: PrefillLinks | None = None
        if options.disaggregation_mode == "prefill":
            self._server = ControlServer(options.host)
            poller.register(self._server.fileno(), zmq.POLLIN)
            self._peers = DecodePeers(
                host, scheduler.worker, backend, heartbeat, self._server, self._on_decode_message, self._on_decode_gone
            )
            self.senders = KVSenders(host, options.page_size, limits, self._peers.send)
        else:
            reactor = Reactor()
            poller.register(reactor.fileno(), zmq.POLLIN)
            self._finder = RegistrationFinder(lambda h, p, answer: self._mailbox.put((h, p, answer)))
            self._links = PrefillLinks(
                host,
                scheduler.worker,
                backend,
                heartbeat,
                reactor,
                self._finder.find,
                self._on_prefill_message,
                self._on_prefill_gone,
                self._on_prefill_down,
            )
            self.receivers = KVReceivers(
                host, options.page_size, limits, self._links.link_to, scheduler.worker.vocab_size
            )

    def start(self, now: float) -> None:
        """A prefill becomes known to its bootstrap server, by a lease that is renewed as long as this process lives."""
        if self._peers is not None:
            worker = self._scheduler.worker
            registration = Registration(
                epoch=self._ctx.epoch,
                control_port=self._server.port,
                fingerprint=worker.fingerprint,
                layout=worker.layout,
                backend=self._options.disaggregation_transfer_backend,
                ttl=LEASE_SECONDS,
            )
            port = self._options.disaggregation_bootstrap_port
            self._lease = LeaseKeeper(registration, self._options.host, port, self._ctx.secret)
            self._lease.start()

    def withdraw(self) -> None:
        """Decodes shall not find this instance any more."""
        if self._lease is not None:
            self._lease.withdraw()
            self._lease = None

    def problem(self, now: float) -> str | None:
        """Why this instance can't serve although its processes are well, None where it can."""
        return self._lease.lost(now) if self._lease is not None else None

    # --- the scheduler's side ---

    def add(self, req: Req, now: float) -> None:
        """Take over a request whose phases run on two instances."""
        if self.senders is not None:
            self.senders.add(req, now)
        elif self.receivers is not None:
            self.receivers.add(req, now)

    def cancel(self, req: Req, reason: str) -> None:
        """The request has ended here before its hand-over was complete."""
        if self.senders is not None:
            self.senders.cancel(req, reason)
        elif self.receivers is not None:
            self.receivers.cancel(req, reason)

    def chunk_planned(self, req: Req) -> None:
        """A step that computes more of the request's prompt was sent to the worker."""
        if self.senders is not None:
            self.senders.chunk_planned(req)

    def first_token(self, req: Req, token: int, logprob: TokenLogprob | None) -> None:
        """An outgoing request's prompt is computed."""
        if self.senders is not None:
            self.senders.first_token(req, token, logprob)

    def pinned(self) -> list[KVHold]:
        """See ``Handovers``."""
        if self.senders is not None:
            return self.senders.pinned()
        return self.receivers.pinned() if self.receivers is not None else []

    def on_transfer_event(self, event: TransferEvent, now: float) -> None:
        """News from the worker's transfer engine."""
        if isinstance(event, SendEnded) and self.senders is not None:
            self.senders.on_send_ended(event)
        elif isinstance(event, PagesVerified) and self.receivers is not None:
            self.receivers.on_verified(event, now)
        elif isinstance(event, PeerConnected):
            if self._peers is not None:
                self._peers.on_peer_connected(event)
            elif self._links is not None:
                self._links.on_peer_connected(event, now)
        elif isinstance(event, PeerLinkDown):
            if self._peers is not None:
                self._peers.on_peer_link_down(event)
            elif self._links is not None:
                self._links.on_peer_link_down(event)

    def poll(self, now: float) -> None:
        """One turn: read peers, move rooms on, keep deadlines."""
        if self._peers is not None and self.senders is not None:
            self._peers.poll(now)
            self.senders.tick(now)
        elif self._links is not None and self.receivers is not None:
            for host, port, answer in self._mailbox.take_all():
                self._links.on_found(host, port, answer, now)
            self._links.poll(now)
            self.receivers.advance(now)

    def flush(self) -> None:
        """Send what this turn has queued for peers."""
        if self._peers is not None:
            self._peers.flush()
        elif self._links is not None:
            self._links.flush()

    def timeout_ms(self) -> int:
        """How long the loop may sleep: heartbeats while there are peers, deadlines while there are rooms."""
        active = self._peers.active if self._peers is not None else self._links is not None and self._links.active
        return self._interval_ms if active else IDLE_TIMEOUT_MS

    def info(self) -> dict[str, Any]:
        """For /server_info."""
        rooms = self.senders or self.receivers
        assert rooms is not None
        info: dict[str, Any] = {"rooms": len(rooms.rooms), "done": rooms.done, "failed": rooms.failed}
        if self.senders is not None and self._peers is not None:
            info |= {"bytes_sent": self.senders.bytes_sent, "push_seconds": round(self.senders.push_seconds, 6)}
            info |= {"peers": self._peers.info(), "refused": self._peers.refused}
        elif self.receivers is not None and self._links is not None:
            info |= {"bytes_received": self.receivers.bytes_received, "refused": self._links.refused}
            info["peers"] = self._links.info()
        return info

    def sent(self) -> HandoverCounts | None:
        """See ``Handovers``."""
        rooms, peers = self.senders, self._peers
        if rooms is None or peers is None:
            return None
        return HandoverCounts(
            open=len(rooms.rooms),
            done=rooms.done,
            failed=rooms.failed,
            nbytes=rooms.bytes_sent,
            seconds=rooms.push_seconds,
            peers=peers.connected,
            refused=peers.refused,
        )

    def received(self) -> HandoverCounts | None:
        """See ``Handovers``."""
        rooms, links = self.receivers, self._links
        if rooms is None or links is None:
            return None
        return HandoverCounts(
            open=len(rooms.rooms),
            done=rooms.done,
            failed=rooms.failed,
            nbytes=rooms.bytes_received,
            seconds=0.0,
            peers=links.connected,
            refused=links.refused,
        )

    # --- the peers' side ---

    def _on_decode_message(self, peer: DecodePeer, message: Any, now: float) -> None:
        assert self.senders is not None
        if isinstance(message, TransferRequest):
            self.senders.on_request(peer, message, now)
        elif isinstance(message, RoomQueued):
            self.senders.on_queued(peer, message, now)
        elif isinstance(message, Abort):
            self.senders.on_abort(peer, message, now)

    def _on_decode_gone(self, peer: DecodePeer, reason: str) -> None:
        assert self.senders is not None
        self.senders.on_peer_gone(peer, reason)

    def _on_prefill_message(self, link: PrefillLink, message: Any) -> None:
        assert self.receivers is not None
        if isinstance(message, TransferDone):
            self.receivers.on_done(link, message)
        elif isinstance(message, TransferFailed):
            self.receivers.on_failed(link, message)
        elif isinstance(message, AbortAck):
            self.receivers.on_abort_ack(link, message)

    def _on_prefill_gone(self, link: PrefillLink) -> None:
        assert self.receivers is not None
        self.receivers.on_link_gone(link)

    def _on_prefill_down(self, link: PrefillLink) -> None:
        assert self.receivers is not None
        self.receivers.on_link_down(link)
