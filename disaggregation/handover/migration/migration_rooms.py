"""Migrations to other instances, of both kinds: the transfer of their KV, and how they end.

A migration that fails while the worker reads its pages is DRAINING until the worker confirms that it has stopped.
"""

from __future__ import annotations

import secrets
from typing import Any

from ....mem_cache.base_prefix_cache import KVHold
from ....mem_cache.page_run import PageRun
from ....messages.base import REASON_CHARS, HandoverId, pack_i32
from ....messages.decode import shown
from ....messages.handover import (
    Abort,
    AbortAck,
    Progress,
    RoomQueued,
    TransferDone,
    TransferFailed,
    TransferRequest,
)
from ....messages.moves import MoveCommit, MoveOffer, MoveReady, MoveRefused
from ....messages.outputs import Timing
from ....messages.worker import CancelSend, SendEnded, SendPages, SendProgress
from ....scheduler.scheduler import Scheduler
from ..kv_sender import delivered_pages, digest_of
from ..limits import HandoverLimits
from ..peer import Peer, PeerState
from ..peer_dispatcher import Handlers, ignore
from .migration import KVPush, Migration, MigrationState


class MigrationRooms:
    """Owner of all migrations and KV returns to other instances, until they are over."""

    def __init__(self, scheduler: Scheduler, limits: HandoverLimits) -> None:
        self._scheduler = scheduler
        self._page_size = scheduler.options.page_size
        self._limits = limits
        self._migrations: list[Migration] = []
        self._rooms: dict[int, Migration] = {}
        """Migrations that were offered to their peer, by room."""
        self._now = 0.0

    def set_time(self, now: float) -> None:
        """Set the time of the present tick, from which deadlines are counted."""
        self._now = now

    def add(self, move: Migration) -> None:
        """Add a migration that begins. It is offered later, when its peer is connected."""
        self._migrations.append(move)

    def draw_id(self, move: Migration) -> HandoverId:
        """Draw a random id for a migration, set its state to OFFERED and return the id. The caller sends the offer."""
        move.handover = HandoverId(move.peer.epoch, secrets.randbits(63), 0)
        move.state = MigrationState.OFFERED
        self._rooms[move.handover.room] = move
        return move.handover

    def when_reached(self, move: Migration, now: float) -> None:
        """Have the owner offer a migration if its peer is connected by now, or fail it if the peer is gone."""
        if move.peer.same_as is not None:
            move.peer = move.peer.same_as
        if move.peer.gone:
            self.fail(move, f"the instance can't be used: {move.peer.reason}")
        elif move.peer.state is PeerState.OPEN:
            move.owner.on_reached(move, now)

    def check_deadline(self, move: Migration, now: float) -> None:
        """Fail a migration that has exceeded its deadline, unless it has failed already."""
        if move.state is not MigrationState.DRAINING and now > move.deadline:
            self.fail(move, f"it took too long ({move.state.name.lower()})")

    # --- the other instance answers ---

    def handlers(self) -> Handlers:
        """Return the handlers of the messages about transfers, and of ``MoveReady`` and ``MoveRefused``."""
        return {
            TransferRequest: self.on_request,
            Abort: self.on_abort,
            RoomQueued: ignore,  # the offer came from this instance
            MoveReady: self.on_ready,
            MoveRefused: self.on_refused,
        }

    def knows(self, handover: HandoverId) -> bool:
        """Return whether this hand-over belongs to a migration or KV return from here."""
        move = self._rooms.get(handover.room)
        return move is not None and move.handover == handover

    def of(self, peer: Peer, handover: HandoverId) -> Migration | None:
        """Return the migration ``handover`` if ``peer``, which has sent a message about it, is its target, or None."""
        move = self._rooms.get(handover.room)
        return move if move is not None and move.handover == handover and move.peer is peer else None

    def on_request(self, peer: Peer, msg: TransferRequest, now: float) -> None:
        """Have the worker push the KV to the other instance, which has memory for it and asks for it.

        If its request does not fit, or the KV is not here any more, fail the migration and tell the peer why.
        """
        move = self.of(peer, msg.handover)
        if move is None or move.state is not MigrationState.OFFERED:
            return
        memory = self._scheduler.memory
        run = memory.pinned.run(msg.decode_prefix_len, move.kv_len, goes_on=move.kv_len)
        problem = self._mismatch(move, msg, run)
        read = move.hold or move.req.hold
        if problem is None and read is not None and not memory.pinned.keep_window(read, run):
            problem = "it has moved on meanwhile, and what its windows held is needed for other requests"
        if problem is not None:
            peer.send(TransferFailed(peer.epoch, msg.handover, 409, problem))
            self.fail(move, problem)
            return
        move.state, move.deadline = MigrationState.PUSHING, self._now + self._limits.transfer
        hold = move.hold if move.hold is not None else memory.pinned.pin(move.req)
        move.hold, move.push = None, KVPush(msg, run, hold)
        src = [pack_i32(pages) for pages in memory.pinned.pages_in(hold, run, run.begin, run.end)]
        # Queued in the order of the steps, so that the steps that compute these pages run first.
        push = SendPages(msg.handover, src, msg.dst_pages, last=True, checksum=msg.checksum)
        self._scheduler.outbox.to_worker(push)

    def _mismatch(self, move: Migration, msg: TransferRequest, run: PageRun) -> str | None:
        req, skipped = move.req, msg.decode_prefix_len
        if move.hold is None and (req.hold is None or req.computed < move.kv_len):
            return "its memory was taken meanwhile, for other requests"
        if msg.prompt_len != move.kv_len or msg.prompt_digest != digest_of(req, move.kv_len):
            return "the other instance means another request"
        bad_prefix = skipped % self._page_size or not 0 <= skipped <= move.kv_len
        if bad_prefix or [len(pages) // 4 for pages in msg.dst_pages] != run.counts:
            return "the other instance offers other pages than are needed"
        return None

    def on_progress(self, event: SendProgress) -> None:
        """Restart the migration's time limit because more of its KV has landed, and have the other instance do the
        same.
        """
        move = self._rooms.get(event.handover.room)
        if move is None or move.push is None or move.state is not MigrationState.PUSHING:
            return
        push = move.push
        if move.handover == event.handover and event.nbytes > push.landed:
            push.landed, move.deadline = event.nbytes, self._now + self._limits.transfer
            pages = delivered_pages(self._scheduler.worker.layout, push.run, push.landed)
            move.peer.send(Progress(move.peer.epoch, event.handover, pages))

    def on_send_ended(self, event: SendEnded) -> None:
        """Unpin the memory of a push that the worker has ended, and send the result to the peer.

        If the push failed or was cancelled, the migration fails.
        """
        move = self._rooms.get(event.handover.room)
        if move is None or move.handover != event.handover or move.push is None:
            return
        if move.state is MigrationState.DRAINING and not event.cancelled:
            return  # it crossed our CancelSend; the answer to that is under way and must find this migration
        asked = move.push.asked
        self._let_go_of(move.push.hold)
        move.push = None
        if move.state is MigrationState.DRAINING:
            self.forget(move)
        elif event.error is not None or event.cancelled:
            reason = f"the KV transfer failed: {event.error or 'cancelled'}"
            move.peer.send(TransferFailed(move.peer.epoch, event.handover, 502, shown(reason, REASON_CHARS)))
            self.fail(move, reason)
        else:
            move.state, move.deadline = MigrationState.LANDING, self._now + self._limits.transfer
            timing, hashes = Timing(transfer_ms=event.seconds * 1000, transfer_bytes=event.nbytes), b""
            if asked.hashes:
                first = asked.decode_prefix_len // self._page_size
                hashes = self._scheduler.memory.debug.hashes_of(move.req, first, move.kv_len // self._page_size)
            move.peer.send(TransferDone(move.peer.epoch, event.handover, event.slices, timing, hashes))
            move.owner.on_sent(move)

    def on_ready(self, peer: Peer, msg: MoveReady, now: float) -> None:
        """Have the owner pause the request: the other instance is ready to continue it."""
        move = self.of(peer, msg.handover)
        if move is not None:
            move.owner.on_ready(move, msg.handover, self._now)

    # --- the ways out ---

    def on_refused(self, peer: Peer, msg: MoveRefused, now: float) -> None:
        """Fail a migration that the other instance has refused or given up, and send it no notice of that.

        Do nothing if the migration has failed already, or if the message is not from its target.
        """
        move = self.of(peer, msg.handover)
        if move is not None and move.state is not MigrationState.DRAINING:
            self.fail(move, f"the other instance does not take it: {shown(msg.reason, REASON_CHARS)}", tell=False)

    def on_too_long(self, peer: Peer, msg: MoveOffer | MoveCommit) -> None:
        """Fail a migration, since its message was not sent: it exceeds the peer's frame limit."""
        move = self.of(peer, msg.handover)
        if move is not None:
            self.fail(move, "its tokens or logprobs are more than one message may hold")

    def on_abort(self, peer: Peer, msg: Abort, now: float) -> None:
        """Fail a migration that the other instance aborts.

        The abort is acknowledged when nothing is written there any more: at once if nothing is being sent.
        """
        move = self.of(peer, msg.handover)
        if move is None or (move.push is None and move.hold is None):
            peer.send(AbortAck(peer.epoch, msg.handover))
        else:
            move.abort_asked = True
        if move is not None:
            self.fail(move, f"the other instance gave up: {shown(msg.reason, REASON_CHARS)}")

    def on_gone(self, peer: Peer) -> None:
        """Fail all migrations to an instance that died or fell silent."""
        for move in [move for move in self._migrations if move.peer is peer]:
            self.fail(move, f"the other instance is gone: {peer.reason}")

    def pinned(self) -> list[KVHold]:
        """Return the holds of memory that the worker reads, or will read, for migrations.

        The pins stay with the migrations.
        """
        holds = [move.push.hold if move.push is not None else move.hold for move in self._migrations]
        return [hold for hold in holds if hold is not None]

    def info(self, now: float) -> list[dict[str, Any]]:
        """Return the open migrations and KV returns for ``/transfers``, JSON-ready."""
        return [move.info(now) for move in self._migrations]

    def fail(self, move: Migration, reason: str, *, tell: bool = True) -> None:
        """End a migration without success. If the worker pushes its KV, order it to cancel that and wait for its
        answer.

        ``tell``: notify the peer, if it knows of the migration. Do nothing if the migration has failed already.
        """
        if move.state is MigrationState.DRAINING:
            return
        state, move.state, move.reason = move.state, MigrationState.DRAINING, reason
        move.owner.on_failed(move, state, reason)
        if tell and move.handover is not None:
            move.peer.send(MoveRefused(move.peer.epoch, move.handover, shown(reason, REASON_CHARS)))
        if move.push is not None:
            self._scheduler.outbox.to_worker(CancelSend(move.push.asked.handover))
            return
        if move.hold is not None:
            self._let_go_of(move.hold)
            move.hold = None
        self.forget(move)

    def forget(self, move: Migration) -> None:
        """Remove a migration that has ended, with or without success, and notify its owner (``on_over``).

        If the peer has aborted it and waits, send the ``AbortAck``. Memory must have been unpinned before.
        """
        self._migrations.remove(move)
        move.owner.on_over(move)
        if move.handover is not None:
            self._rooms.pop(move.handover.room, None)
            if move.abort_asked:
                move.peer.send(AbortAck(move.peer.epoch, move.handover))

    def _let_go_of(self, hold: KVHold) -> None:
        """Release a migration's pin of the memory ``hold``, and its window pages: the worker reads them no more.

        A request that still runs keeps its memory. Otherwise the last pin frees it, and verified KV stays cached.
        """
        self._scheduler.memory.pinned.let_window_go(hold)
        self._scheduler.memory.pinned.unpin(hold)
