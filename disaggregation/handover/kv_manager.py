"""The scheduler's interface to disaggregation: one object for every hand-over of an instance, in both directions.

``KVManager`` owns the sender's side, the receiver's side and the peers of both. A request's ``route`` says which side
it needs. Everything runs inside the scheduler's loop: ``poll`` is called once a tick and never blocks.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from functools import partial
from typing import Any

from ...mem_cache.base_prefix_cache import KVHold
from ...messages.base import Message
from ...messages.handover import (
    Abort,
    AbortAck,
    Declined,
    FirstToken,
    Forecast,
    ForecastRequest,
    Progress,
    RoomQueued,
    TransferDone,
    TransferFailed,
    TransferRequest,
    Withdraw,
    Withdrawn,
)
from ...messages.metrics import Family
from ...messages.moves import MigrateReq, MoveCommit, MoveOffer, MoveReady, MoveRefused, MoveTaken
from ...messages.outputs import TokenLogprob
from ...messages.requests import Bootstrap
from ...messages.worker import (
    ConnectPeer,
    PagesVerified,
    PeerCommand,
    SendEnded,
    SendPages,
    SendProgress,
    TransferEvent,
)
from ...runtime.answer_keys import AnswerKeys
from ...runtime.metrics import Metrics, counter, read
from ...runtime.options import ServerOptions
from ...runtime.transfer_backends import BACKENDS
from ...runtime.web.ports import is_loopback, means_this_host
from ...scheduler.req import Req, Route
from ...scheduler.scheduler import Scheduler
from ..bootstrap.registration import Registration
from .control.frames import LONG_FRAME_BYTES
from .greeting import Greeting, digest
from .limits import HandoverLimits
from .migration.migration_source import MigrationSource
from .migration.migration_target import MigrationTarget
from .network import Network
from .peer import Peer
from .peers import METRICS as PEER_METRICS
from .peers import Peers
from .placement_policy import METRICS as PLACEMENT_METRICS
from .placement_policy import PlacementPolicy
from .receiver_table import METRICS as RECEIVED_METRICS
from .receiver_table import ReceiverTable
from .sender_table import METRICS as SENT_METRICS
from .sender_table import SenderTable
from .store_first import METRICS as FETCH_METRICS

log = logging.getLogger(__name__)

IDLE_TIMEOUT_MS = 1000
LOOKS = 4
"""Polls per heartbeat interval. Silence is noticed at most 1/``LOOKS`` of an interval late."""
LEASE_SECONDS = 6.0
"""Lifetime of a registration at the bootstrap server, in seconds."""


class KVManager:
    """Owner of all hand-overs and migrations of one instance, in both directions."""

    def __init__(
        self, epoch: str, scheduler: Scheduler, network: Network, answer_keys: AnswerKeys | None = None
    ) -> None:
        options = scheduler.options
        limits = HandoverLimits.of(options)
        self._epoch = epoch
        self._options = options
        self._scheduler = scheduler
        self._network = network
        self._now = 0.0
        self._interval_ms = int(options.disaggregation_heartbeat_interval * 1000)
        self._peers = Peers(
            Greeting(epoch, scheduler.worker, options.disaggregation_transfer_backend),
            (options.disaggregation_heartbeat_interval, options.disaggregation_heartbeat_timeout),
            network.port,
            network.find,
            self._tell_worker,
            self,
            takes_moves=network.port.is_sealed or asks_nobody(options),
        )
        self._choice = PlacementPolicy(options.disaggregation_threshold, scheduler.estimator)
        self.senders = SenderTable(scheduler, epoch, options.page_size, limits, self._choice)
        self.receivers = ReceiverTable(scheduler, epoch, limits, self._peers.peer_at, self._choice)
        reach = partial(self._peers.peer_at, want=False)
        self.moves_out = MigrationSource(scheduler, limits, reach)
        self.moves_in = MigrationTarget(
            *(scheduler, limits, self._peers, self.receivers, options.port, answer_keys or AnswerKeys()),
            knows_peers=network.port.is_sealed,
        )

    def start(self, now: float) -> None:
        """See ``Handovers``."""
        self._register()

    def role_changed(self) -> None:
        """See ``Handovers``."""
        self._register()

    def _register(self) -> None:
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
        """See ``Handovers``."""
        self._network.withdraw()

    def close(self, reason: str) -> None:
        """See ``Handovers``."""
        self._network.pause()
        self._peers.close(reason)

    @property
    def is_closed(self) -> bool:
        """See ``Handovers``."""
        return self._peers.closed is not None and not self._peers.lingering

    @property
    def may_resize(self) -> bool:
        """See ``Handovers``."""
        return not BACKENDS[self._options.disaggregation_transfer_backend].pins_pool

    def open(self) -> None:
        """See ``Handovers``."""
        if self._peers.closed is not None:
            self._peers.closed = None
            self._register()

    def problem(self, now: float) -> str | None:
        """See ``Handovers``."""
        # Other instances must find a prefill instance; every other role can serve without a registration.
        return self._network.lost(now) if self._scheduler.role == "prefill" else None

    def warning(self, now: float) -> str | None:
        """See ``Handovers``."""
        return self.receivers.warning(now)

    def found_at(self) -> tuple[str, int] | None:
        """See ``Handovers``."""
        port = self._network.bootstrap_port
        return None if port is None else (self._options.advertise_host or "", port)

    # --- the scheduler's side ---

    def names_here(self, where: Bootstrap) -> bool:
        """Return whether a request's bootstrap address is this instance's own."""
        if where.port != self._network.bootstrap_port:
            return False
        return where.host in (self._options.host, self._options.advertise_host) or means_this_host(where.host)

    def may_mean_here(self, where: Bootstrap) -> bool:
        """See ``Handovers``."""
        return where.port == self._network.bootstrap_port

    def add(self, req: Req, now: float) -> None:
        """Open a hand-over for a request with its prefill and decode on two instances."""
        if req.route is Route.OUTGOING:
            self.senders.add(req, now)
        else:
            self.receivers.add(req, now)

    def cancel(self, req: Req, reason: str) -> None:
        """Abandon every hand-over and migration of a request that ended here before they were complete."""
        self._choice.never_came(req, self._now)
        self.moves_out.cancel(req, reason)
        self.moves_in.cancel(req, reason)
        self.senders.cancel(req, reason)
        self.receivers.cancel(req, reason)

    def migrate(self, ask: MigrateReq, now: float) -> None:
        """See ``Handovers``."""
        self.moves_out.migrate(ask, now)

    def finished(self, req: Req) -> None:
        """See ``Handovers``."""
        if self._options.return_kv:
            self.moves_out.give_back(req)

    def move_all(self, to: list[tuple[str, int]]) -> None:
        """See ``Handovers``."""
        self.moves_out.move_all(to)

    def chunk_planned(self, req: Req) -> SendPages | None:
        """See ``Handovers``."""
        return self.senders.chunk_planned(req)

    def first_token(self, req: Req, token: int, logprob: TokenLogprob | None) -> None:
        """Pass on the first token of an outgoing request, now that its prompt is computed."""
        self.senders.first_token(req, token, logprob)

    def came_true(self, req: Req, now: float) -> None:
        """See ``Handovers``."""
        self._choice.learn(req, now)

    def pinned(self) -> list[KVHold]:
        """See ``Handovers``."""
        return self.senders.pinned() + self.receivers.pinned() + self.moves_out.pinned()

    def on_transfer_event(self, event: TransferEvent, now: float) -> None:
        """Pass an event of the worker's transfer engine to the side that it concerns."""
        if isinstance(event, SendEnded) and self.moves_out.knows(event.handover):
            self.moves_out.on_send_ended(event)
        elif isinstance(event, SendEnded):
            self.senders.on_send_ended(event)
        elif isinstance(event, SendProgress):
            side = self.moves_out if self.moves_out.knows(event.handover) else self.senders
            side.on_progress(event)
        elif isinstance(event, PagesVerified):
            self.receivers.on_verified(event, now)
        else:
            self._peers.on_event(event, now)

    def poll(self, now: float) -> None:
        """Run one tick: read messages of peers, advance rooms and enforce deadlines."""
        self._now = now
        for host, port, answer in self._network.take_found():
            self._peers.on_found(host, port, answer, now)
        self._peers.poll(now)
        self.senders.tick(now)
        self.moves_out.advance(now)
        self.moves_in.advance(now)
        # Last, because the other sides may have freed memory.
        self.receivers.advance(now)

    def flush(self) -> None:
        """Send the messages that this tick has queued for peers."""
        self._peers.flush()

    def timeout_ms(self) -> int:
        """Return how long the loop may sleep, in milliseconds.

        While there are peers it is a fraction of the heartbeat interval, so that their silence is noticed soon.
        """
        return max(1, self._interval_ms // LOOKS) if self._peers.active else IDLE_TIMEOUT_MS

    def info(self) -> dict[str, Any]:
        """Return the ``disaggregation`` object of ``/server_info``."""
        ports = {"bootstrap_port": self._network.bootstrap_port, "control_port": self._network.port.port}
        sent, received = self.senders, self.receivers
        return ports | {
            "sent": {"rooms": len(sent.rooms), "done": sent.done, "failed": sent.failed, "bytes": sent.bytes_sent}
            | {"push_seconds": round(sent.push_seconds, 6)},
            "received": {"rooms": len(received.rooms), "done": received.done, "failed": received.failed}
            | {"bytes": received.bytes_received, "withdrawn": received.withdrawn},
            "peers": self._peers.info(),
            "refused": self._peers.refused,
            "choices": self._choice.info(),
            "store_first": asdict(received.store_first.counts),
        }

    def transfers(self, now: float) -> list[dict[str, Any]]:
        """See ``Handovers``."""
        sides = (self.senders, self.receivers, self.moves_out, self.moves_in)
        return [room for side in sides for room in side.info(now)]

    def metrics(self) -> list[Family]:
        """See ``Handovers``."""
        return [
            *read(SENT_METRICS, self.senders),
            *read(RECEIVED_METRICS, self.receivers),
            *read(PLACEMENT_METRICS, self._choice),
            *read(FETCH_METRICS, self.receivers.store_first.counts),
            *read(METRICS, self),
            *read(PEER_METRICS, self._peers),
        ]

    def _tell_worker(self, command: PeerCommand) -> None:
        # ConnectPeer queues after the steps: pages meant for the previous link must not be sent over the next one.
        outbox = self._scheduler.outbox
        (outbox.to_worker if isinstance(command, ConnectPeer) else outbox.to_transfer)(command)

    # --- the peers' side ---

    def on_message(self, peer: Peer, message: Any, now: float) -> None:
        """See ``PeerOwner``."""
        match message:
            case TransferRequest() if self.moves_out.knows(message.handover):
                self.moves_out.on_request(peer, message)
            case Abort() if self.moves_out.knows(message.handover):
                self.moves_out.on_abort(peer, message)
            case RoomQueued() if self.moves_out.knows(message.handover):
                pass  # nothing to do: the offer came from this instance
            case TransferRequest():
                self.senders.on_request(peer, message, now)
            case RoomQueued():
                self.senders.on_queued(peer, message, now)
            case Withdraw():
                self.senders.on_withdraw(peer, message, now)
            case Abort():
                self.senders.on_abort(peer, message, now)
            case ForecastRequest():
                self.senders.on_forecast_request(peer, message, now)
            case Declined():
                self.senders.on_declined(peer, message, now)
            case Forecast():
                self.receivers.on_forecast(peer, message)
            case Progress():
                self.receivers.on_progress(peer, message, now)
            case FirstToken():
                self.receivers.on_first_token(peer, message, now)
            case TransferDone():
                self.receivers.on_done(peer, message)
            case TransferFailed():
                self.receivers.on_failed(peer, message)
            case Withdrawn():
                self.receivers.on_withdrawn(peer, message, now)
            case AbortAck():
                self.receivers.on_abort_ack(peer, message)
            case MoveOffer():
                self.moves_in.on_offer(peer, message, now)
            case MoveCommit():
                self.moves_in.on_commit(peer, message, now)
            case MoveReady():
                self.moves_out.on_ready(peer, message)
            case MoveTaken():
                self.moves_out.on_taken(peer, message, now)
            case MoveRefused() if self.moves_out.knows(message.handover):
                self.moves_out.on_refused(peer, message)
            case MoveRefused():
                self.moves_in.on_refused(peer, message)

    def on_gone(self, peer: Peer) -> None:
        """See ``PeerOwner``."""
        self.moves_out.on_gone(peer)
        self.moves_in.on_gone(peer)
        self.senders.on_gone(peer)
        self.receivers.on_gone(peer)

    def on_down(self, peer: Peer) -> None:
        """See ``PeerOwner``."""
        self.receivers.on_down(peer)

    def on_too_long(self, peer: Peer, message: Message) -> None:
        """See ``PeerOwner``."""
        # All other messages have limits of their own.
        if isinstance(message, MoveOffer | MoveCommit):
            self.moves_out.on_too_long(peer, message.handover)
        elif isinstance(message, FirstToken):
            text = f"the prompt's logprobs are longer than {LONG_FRAME_BYTES >> 20} MiB; ask for fewer top_logprobs"
            self.senders.give_up(message.handover, 400, text)


def asks_nobody(options: ServerOptions) -> bool:
    """Return whether this instance serves every client that can reach it: a loopback address and no API key.

    In that case peers without a cluster secret may send it requests, too.
    """
    return is_loopback(options.host) and options.api_key is None and options.api_key_file is None


METRICS: Metrics[KVManager] = (
    counter(
        "pdserve_requests_moved_total",
        "Running requests that were to go on at another instance, or came from one.",
        lambda m: {
            ("out", "done"): m.moves_out.done,
            ("out", "failed"): m.moves_out.failed,
            ("in", "done"): m.moves_in.done,
            ("in", "failed"): m.moves_in.failed,
        },
        "direction",
        "outcome",
        note="Directions: `out`, `in`. Outcomes: `done`, `failed`.",
    ),
    counter(
        "pdserve_moved_pause_seconds_total",
        "Time that requests stood still while they moved to another instance.",
        lambda m: m.moves_out.paused_seconds,
    ),
    counter(
        "pdserve_kv_returned_total",
        "Finished requests with KV given back to a prefill, or taken from a decode.",
        lambda m: {"out": m.moves_out.given, "in": m.moves_in.kept},
        "direction",
        note="Directions: `out`, `in`. With `--return-kv`.",
    ),
)
