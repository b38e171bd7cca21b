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
from ...messages.base import HandoverId
from ...messages.handover import FirstToken
from ...messages.metrics import Family
from ...messages.moves import MigrateReq, MoveCommit, MoveOffer
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
from ...runtime.transfer_backends import BACKENDS
from ...runtime.web.ports import is_loopback
from ...scheduler.options import SchedulerOptions
from ...scheduler.req import Req, Route
from ...scheduler.scheduler import Scheduler
from .limits import HandoverLimits
from .local_instance import LocalInstance
from .membership import InstanceMembership
from .migration.migration_rooms import MigrationRooms
from .migration.migration_source import MigrationSource
from .migration.migration_target import MigrationTarget
from .network import Network
from .peer_dispatcher import PeerDispatcher
from .peers import METRICS as PEER_METRICS
from .peers import Peers
from .placement_policy import METRICS as PLACEMENT_METRICS
from .placement_policy import PlacementPolicy
from .prompt_pushes import PromptPushes
from .receiver_table import METRICS as RECEIVED_METRICS
from .receiver_table import ReceiverTable
from .sender_table import METRICS as SENT_METRICS
from .sender_table import SenderTable
from .store_first import METRICS as FETCH_METRICS

log = logging.getLogger(__name__)

IDLE_TIMEOUT_MS = 1000
LOOKS = 4
"""Polls per heartbeat interval. Silence is noticed at most 1/``LOOKS`` of an interval late."""


class KVManager:
    """Owner of all hand-overs and migrations of one instance, in both directions."""

    def __init__(
        self, epoch: str, scheduler: Scheduler, network: Network, answer_keys: AnswerKeys | None = None
    ) -> None:
        options = scheduler.options
        limits, dispatcher = HandoverLimits.of(options), PeerDispatcher()
        self._options = options
        self._scheduler = scheduler
        self._network = network
        self._now = 0.0
        self._interval_ms = int(options.disaggregation_heartbeat_interval * 1000)
        self._peers = Peers(
            LocalInstance(epoch, scheduler.worker, options.disaggregation_transfer_backend),
            (options.disaggregation_heartbeat_interval, options.disaggregation_heartbeat_timeout),
            network.port,
            network.find,
            self._tell_worker,
            dispatcher,
            takes_moves=network.port.is_sealed or admits_any_client(options),
        )
        self._policy = PlacementPolicy(options.disaggregation_threshold, scheduler.estimator)
        self.senders = SenderTable(scheduler, epoch, options.page_size, limits, self._policy)
        self.receivers = ReceiverTable(scheduler, epoch, limits, self._peers.peer_at, self._policy)
        reach = partial(self._peers.peer_at, want=False)
        self.moves_out = MigrationSource(scheduler, limits, reach)
        self.moves_in = MigrationTarget(
            *(scheduler, limits, self._peers, self.receivers, options.port, answer_keys or AnswerKeys()),
            knows_peers=network.port.is_sealed,
        )
        self.membership = InstanceMembership(epoch, scheduler, network, self._peers)
        # The receivers come last, because the other sides may free memory. Migrations come first: they claim theirs.
        moves_out, too_long = self.moves_out, self.moves_out.rooms.on_too_long
        dispatcher.register(
            *(moves_out.handlers(), moves_out.rooms.on_gone),
            claims=moves_out.rooms.knows,
            too_long={MoveOffer: too_long, MoveCommit: too_long},
        )
        dispatcher.register(self.moves_in.handlers(), self.moves_in.on_gone)
        dispatcher.register(
            self.senders.handlers(), self.senders.on_gone, too_long={FirstToken: self.senders.on_too_long}
        )
        dispatcher.register(self.receivers.handlers(), self.receivers.on_gone, on_down=self.receivers.on_down)

    @property
    def may_resize(self) -> bool:
        """Whether the transfer backend allows that memory of the KV pool is given back while peers are connected."""
        return not BACKENDS[self._options.disaggregation_transfer_backend].pins_pool

    def warning(self, now: float) -> str | None:
        """Return that hanging peers keep KV memory of ended incoming hand-overs unusable, or None."""
        return self.receivers.warning(now)

    def add(self, req: Req, where: Bootstrap, now: float) -> None:
        """Open a hand-over for a request with its prefill and decode on two instances, on the side of its route.

        ``where``: bootstrap room, and bootstrap address of the prefill.
        """
        if req.route is Route.OUTGOING:
            self.senders.add(req, where.room, now)
        else:
            self.receivers.add(req, where, now)

    def cancel(self, req: Req, reason: str) -> None:
        """Abandon every hand-over and migration of a request that ended here before they were complete."""
        self._policy.on_cancelled(req, self._now)
        self.moves_out.cancel(req, reason)
        self.moves_in.cancel(req, reason)
        self.senders.cancel(req, reason)
        self.receivers.cancel(req, reason)

    def migrate(self, ask: MigrateReq, now: float) -> None:
        """Begin to migrate request ``ask.rid`` to the instance at bootstrap address ``ask.host:ask.port``.

        The outbox gets the answer when the migration has succeeded or failed. A failure is answered with 409.
        """
        self.moves_out.migrate(ask, now)

    def on_finished(self, req: Req) -> None:
        """Offer the KV of the request to the prefill that computed its prompt, if ``return_kv`` is set: the output is
        new there.
        """
        if self._options.return_kv:
            self.moves_out.returns.give_back(req)

    def move_all(self, to: list[tuple[str, int]]) -> None:
        """Set the bootstrap addresses to which all requests migrate, in rotation. Later ticks start the migrations.

        An empty list starts no more migrations.
        """
        self.moves_out.move_all(to)

    def take_computed_pages(self, req: Req) -> SendPages | None:
        """Return the pages of an outgoing prompt that the worker pushes after the step that is about to be sent.

        None while no further page is complete, or the decode has not asked for the KV. Pins the request's memory.
        """
        return self.senders.pushes.take_computed_pages(req)

    def on_prompt_computed(self, req: Req, token: int, logprob: TokenLogprob | None) -> None:
        """Send the first token to the decode; if the decode has not asked for the KV yet, keep the token until then."""
        self.senders.pushes.on_prompt_computed(req, token, logprob)

    def on_first_token(self, req: Req, now: float) -> None:
        """Adjust the placement policy's estimates by the actual TTFT of a request that was placed by an estimate."""
        self._policy.on_first_token(req, now)

    def pinned(self) -> list[KVHold]:
        """Return the pinned memory of senders, receivers and outgoing migrations: transfers may still access it."""
        return self.senders.pinned() + self.receivers.pinned() + self.moves_out.rooms.pinned()

    def on_transfer_event(self, event: TransferEvent, now: float) -> None:
        """Pass an event of the worker's transfer engine to the side that it concerns."""
        match event:
            case SendEnded():
                self._pushing_side(event.handover).on_send_ended(event)
            case SendProgress():
                self._pushing_side(event.handover).on_progress(event)
            case PagesVerified():
                self.receivers.on_verified(event, now)
            case _:
                self._peers.on_event(event, now)

    def _pushing_side(self, handover: HandoverId) -> MigrationRooms | PromptPushes:
        return self.moves_out.rooms if self.moves_out.rooms.knows(handover) else self.senders.pushes

    def poll(self, now: float) -> None:
        """Run one tick: read messages of peers, advance hand-overs and migrations, and enforce deadlines."""
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
        return max(1, self._interval_ms // LOOKS) if self._peers.table.active else IDLE_TIMEOUT_MS

    def info(self) -> dict[str, Any]:
        """Return the ``disaggregation`` object of ``/server_info``."""
        ports = {"bootstrap_port": self._network.bootstrap_port, "control_port": self._network.port.port}
        sent, received = self.senders, self.receivers
        return ports | {
            "sent": {"rooms": len(sent.rooms), "done": sent.pushes.done, "failed": sent.failed}
            | {"bytes": sent.pushes.bytes_sent, "push_seconds": round(sent.pushes.push_seconds, 6)},
            "received": {"rooms": len(received.rooms), "done": received.done, "failed": received.failed}
            | {"bytes": received.bytes_received, "withdrawn": received.withdrawn},
            "peers": self._peers.table.info(),
            "refused": self._peers.refused,
            "choices": self._policy.info(),
            "store_first": asdict(received.placement.store_first.counts),
        }

    def transfers(self, now: float) -> list[dict[str, Any]]:
        """Return a JSON-ready dict for each open hand-over and migration of both directions. ``now`` sets their age."""
        sides = (self.senders, self.receivers, self.moves_out.rooms, self.moves_in)
        return [room for side in sides for room in side.info(now)]

    def metrics(self) -> list[Family]:
        """Return the metrics of senders, receivers, placement decisions, store fetches, migrations and peers."""
        return [
            *read(SENT_METRICS, self.senders),
            *read(RECEIVED_METRICS, self.receivers),
            *read(PLACEMENT_METRICS, self._policy),
            *read(FETCH_METRICS, self.receivers.placement.store_first.counts),
            *read(METRICS, self),
            *read(PEER_METRICS, self._peers),
        ]

    def _tell_worker(self, command: PeerCommand) -> None:
        # ConnectPeer queues after the steps: pages meant for the previous link must not be sent over the next one.
        outbox = self._scheduler.outbox
        (outbox.to_worker if isinstance(command, ConnectPeer) else outbox.to_transfer)(command)


def admits_any_client(options: SchedulerOptions) -> bool:
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
        lambda m: {"out": m.moves_out.returns.given, "in": m.moves_in.kept},
        "direction",
        note="Directions: `out`, `in`. With `--return-kv`.",
    ),
)
