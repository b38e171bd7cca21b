"""Running requests that go to another instance.

A ``Move`` is one::

    REACHING → OFFERED → PUSHING → LANDING → FREEZING → COMMITTED → (it is over here)
                  └─────────(no KV to take along)───────▲

The request runs on until FREEZING: what it holds of whole pages when it is offered goes ahead, and what it writes
meanwhile the other instance computes again, a handful of tokens. So it stands still for a few steps, however long it
is. Whatever fails before the other has said that it goes on there, it goes on here, and has lost nothing. DRAINING: it
is off, and the worker may still read its pages.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import msgspec

from ....mem_cache.base_prefix_cache import KVHold
from ....messages.base import REASON_CHARS, HandoverId, pack_i32
from ....messages.decode import shown
from ....messages.handover import Abort, AbortAck, TransferDone, TransferFailed, TransferRequest
from ....messages.moves import (
    MigrateReq,
    MigrateResult,
    MoveCommit,
    MoveOffer,
    MoveReady,
    MoveRefused,
    MoveTaken,
    ReqMoved,
    RunningRequest,
)
from ....messages.outputs import Timing
from ....messages.worker import CancelSend, SendEnded, SendPages
from ....scheduler.req import Req, ReqState, Route
from ....scheduler.scheduler import Scheduler
from ..kv_sender import digest_of
from ..limits import HandoverLimits
from ..peer import Peer, PeerState

log = logging.getLogger(__name__)

COMMIT_SECONDS = 10.0
"""For the other instance to say that it goes on there: it has all it needs, and the client waits."""


class MoveState(Enum):
    """Where a move stands; see the module."""

    REACHING = auto()
    OFFERED = auto()
    PUSHING = auto()
    LANDING = auto()
    FREEZING = auto()
    COMMITTED = auto()
    DRAINING = auto()


@dataclass(slots=True, eq=False)
class Move:
    """One request on its way to ``peer``, which is found at ``host`` and ``port``.

    ``question``: who asked for it. ``kv_len``: of how many tokens the KV goes ahead. ``offered``: how many tokens were
    known then. ``frozen_at``: since when the request stands still, 0 while it doesn't. ``hold``: its memory, pinned
    while it is pushed. ``abort_asked``: the peer waits to hear that nothing more will be written.
    """

    question: int
    req: Req
    host: str
    port: int
    peer: Peer
    since: float
    deadline: float
    state: MoveState = MoveState.REACHING
    handover: HandoverId | None = None
    kv_len: int = 0
    offered: int = 0
    hold: KVHold | None = None
    frozen_at: float = 0.0
    abort_asked: bool = False
    reason: str = ""


class MovesOut:
    """Owner of all moves to others. ``reach`` gives the peer behind a bootstrap address."""

    def __init__(self, scheduler: Scheduler, limits: HandoverLimits, reach: Callable[[str, int, float], Peer]) -> None:
        self._scheduler = scheduler
        self._page_size = scheduler.options.page_size
        self._limits = limits
        self._reach = reach
        self._moves: dict[str, Move] = {}
        """By the request's name: those that are not off."""
        self._rooms: dict[int, Move] = {}
        """All that the peer has heard of."""
        self._now = 0.0
        self.done = 0
        self.failed = 0

    # --- asked for ---

    def migrate(self, ask: MigrateReq, now: float) -> None:
        """Move a request; the answer comes when it has, or can't be."""
        self._now = now
        req = self._scheduler.reqs.get(ask.rid)
        problem = None
        if req is None:
            problem = f"no request {ask.rid!r} is running here"
        elif req.rid in self._moves:
            problem = f"request {ask.rid!r} is being moved already"
        elif req.route is Route.OUTGOING:
            problem = f"request {ask.rid!r} is computed for another instance, and ends here by itself"
        if problem is not None:
            self._answer(MigrateResult(ask.id, moved=False, message=problem))
            return
        assert req is not None
        peer = self._reach(ask.host, ask.port, now)
        deadline = now + self._limits.bootstrap
        self._moves[req.rid] = Move(ask.id, req, ask.host, ask.port, peer, now, deadline)

    def advance(self, now: float) -> None:
        """Move on what can move; give up what has waited too long."""
        self._now = now
        for move in list(self._moves.values()):
            if move.req.is_ended:
                self._fail(move, "the request has ended")
            elif move.state is MoveState.REACHING:
                self._when_reached(move, now)
            elif move.state is MoveState.FREEZING and not move.req.pending:
                self._commit(move, now)
            if move.state is not MoveState.DRAINING and now > move.deadline:
                self._fail(move, f"it took too long ({move.state.name.lower()})")

    def _when_reached(self, move: Move, now: float) -> None:
        if move.peer.same_as is not None:
            move.peer = move.peer.same_as
        if move.peer.gone:
            self._fail(move, f"the instance can't be used: {move.peer.reason}")
        elif move.peer.state is PeerState.OPEN and self._can_leave(move.req):
            self._offer(move, now)

    @staticmethod
    def _can_leave(req: Req) -> bool:
        """Whether its tokens, and what is computed of them, are its own to give away now."""
        if req.state is ReqState.RUNNING:
            return bool(req.output_len)
        return req.state is ReqState.WAITING and req.hold is None and not req.pending

    def _offer(self, move: Move, now: float) -> None:
        req, peer = move.req, move.peer
        move.handover = HandoverId(peer.epoch, secrets.randbits(63), 0)
        computed = min(req.computed, req.known_len) if req.hold is not None else 0
        move.kv_len = computed // self._page_size * self._page_size
        move.offered = req.known_len
        move.state = MoveState.OFFERED
        move.deadline = now + self._limits.bootstrap + self._limits.queue
        self._rooms[move.handover.room] = move
        # It names a hand-over of its own, if it came by one; that is over.
        request = msgspec.structs.replace(req.msg, bootstrap=None)
        output = req.token_ids[req.prompt_len : req.known_len].tobytes()
        running = RunningRequest(request, output, req.max_new_tokens, max(0.0, now - req.times.arrival))
        peer.send(MoveOffer(peer.epoch, move.handover, running, move.kv_len))

    # --- the other instance answers ---

    def knows(self, handover: HandoverId) -> bool:
        """Whether this hand-over is a move's."""
        move = self._rooms.get(handover.room)
        return move is not None and move.handover == handover

    def on_request(self, peer: Peer, msg: TransferRequest) -> None:
        """It has memory, and wants the KV."""
        move = self._of(peer, msg.handover)
        if move is None or move.state is not MoveState.OFFERED:
            return
        problem = self._mismatch(move, msg)
        if problem is not None:
            peer.send(TransferFailed(peer.epoch, msg.handover, 409, problem))
            self._fail(move, problem)
            return
        memory = self._scheduler.memory
        move.state, move.deadline = MoveState.PUSHING, self._now + self._limits.transfer
        move.hold = memory.pin(move.req)
        src = memory.pages(move.req, msg.decode_prefix_len, move.kv_len)
        # In the order of the steps, so that those which compute these pages come before.
        push = SendPages(msg.handover, pack_i32(src), msg.dst_pages, last=True, checksum=msg.checksum)
        self._scheduler.outbox.to_worker(push)

    def _mismatch(self, move: Move, msg: TransferRequest) -> str | None:
        req, skipped = move.req, msg.decode_prefix_len
        if req.hold is None or req.computed < move.kv_len:
            return "its memory was taken meanwhile, for other requests"
        if msg.prompt_len != move.kv_len or msg.prompt_digest != digest_of(req, move.kv_len):
            return "the other instance means another request"
        bad_prefix = skipped % self._page_size or not 0 <= skipped <= move.kv_len
        if bad_prefix or len(msg.dst_pages) != 4 * ((move.kv_len - skipped) // self._page_size):
            return "the other instance offers other pages than are needed"
        return None

    def on_send_ended(self, event: SendEnded) -> None:
        """The worker will not touch this hand-over's pages again."""
        move = self._rooms.get(event.handover.room)
        if move is None or move.handover != event.handover or move.hold is None:
            return
        if move.state is MoveState.DRAINING and not event.cancelled:
            return  # it crossed our cancel, whose own answer is under way, and must find this move
        self._scheduler.memory.unpin(move.hold)
        move.hold = None
        if move.state is MoveState.DRAINING:
            self._forget(move)
        elif event.error is not None or event.cancelled:
            reason = f"the KV transfer failed: {event.error or 'cancelled'}"
            move.peer.send(TransferFailed(move.peer.epoch, event.handover, 502, shown(reason, REASON_CHARS)))
            self._fail(move, reason)
        else:
            move.state = MoveState.LANDING
            timing = Timing(transfer_ms=event.seconds * 1000, transfer_bytes=event.nbytes)
            move.peer.send(TransferDone(move.peer.epoch, event.handover, event.slices, timing))

    def on_ready(self, peer: Peer, msg: MoveReady) -> None:
        """It can go on there: let it stand still here."""
        move = self._of(peer, msg.handover)
        if move is None:
            return
        if move.state is MoveState.LANDING or (move.state is MoveState.OFFERED and not move.kv_len):
            move.state, move.frozen_at = MoveState.FREEZING, self._now
            move.deadline = self._now + COMMIT_SECONDS
            self._scheduler.hold_back(move.req)

    def _commit(self, move: Move, now: float) -> None:
        req, peer = move.req, move.peer
        assert move.handover is not None
        move.state = MoveState.COMMITTED
        commit = MoveCommit(
            peer.epoch,
            move.handover,
            output=req.token_ids[move.offered : req.known_len].tobytes(),
            cached_tokens=req.cached_tokens,
            retractions=req.retractions,
            first_token_age=max(0.0, now - req.times.first_token) if req.times.first_token else 0.0,
            timing=req.timing,
            logprobs=req.logprobs,
            input_logprobs=req.input_logprobs,
        )
        peer.send(commit)

    def on_taken(self, peer: Peer, msg: MoveTaken, now: float) -> None:
        """It goes on there."""
        move = self._of(peer, msg.handover)
        if move is None or move.state is not MoveState.COMMITTED:
            return
        req = move.req
        self._forget(move)
        self.done += 1
        paused_ms = (now - move.frozen_at) * 1000
        log.info("it goes on at %s:%d", move.host, msg.port, extra={"rid": req.rid})
        self._scheduler.leave_moved(req, ReqMoved(req.rid, move.host, msg.port, msg.key))
        self._answer(MigrateResult(move.question, moved=True, paused_ms=paused_ms))

    # --- the ways out ---

    def on_refused(self, peer: Peer, msg: MoveRefused) -> None:
        """It can't go on there."""
        move = self._of(peer, msg.handover)
        if move is not None and move.state is not MoveState.DRAINING:
            self._fail(move, f"the other instance does not take it: {shown(msg.reason, REASON_CHARS)}", tell=False)

    def on_abort(self, peer: Peer, msg: Abort) -> None:
        """The other instance does not want the KV any more."""
        move = self._of(peer, msg.handover)
        if move is None or move.hold is None:
            peer.send(AbortAck(peer.epoch, msg.handover))
        else:
            move.abort_asked = True
        if move is not None:
            self._fail(move, f"the other instance gave up: {shown(msg.reason, REASON_CHARS)}")

    def on_gone(self, peer: Peer) -> None:
        """The other instance died or fell silent."""
        for move in {id(m): m for m in [*self._moves.values(), *self._rooms.values()] if m.peer is peer}.values():
            self._fail(move, f"the other instance is gone: {peer.reason}")

    def cancel(self, req: Req, reason: str) -> None:
        """The request has ended here."""
        move = self._moves.get(req.rid)
        if move is not None and move.req is req:
            self._fail(move, f"the request has ended: {reason}")

    def pinned(self) -> list[KVHold]:
        """Memory that the worker may still read."""
        return [m.hold for m in self._rooms.values() if m.hold is not None]

    def info(self, now: float) -> list[dict[str, Any]]:
        """For /transfers."""
        return [
            {
                "direction": "moving",
                "room": move.handover.room if move.handover is not None else 0,
                "state": move.state.name.lower(),
                "rid": move.req.rid,
                "peer": move.peer.epoch or None,
                "seconds": round(now - move.since, 3),
                "prompt_tokens": move.req.prompt_len,
                "reason": move.reason or None,
            }
            for move in {id(m): m for m in [*self._moves.values(), *self._rooms.values()]}.values()
        ]

    def _of(self, peer: Peer, handover: HandoverId) -> Move | None:
        move = self._rooms.get(handover.room)
        return move if move is not None and move.handover == handover and move.peer is peer else None

    def _answer(self, result: MigrateResult) -> None:
        self._scheduler.outbox.answer(result)

    def _fail(self, move: Move, reason: str, *, tell: bool = True) -> None:
        """It does not move; where it stood still it goes on here."""
        if move.state is MoveState.DRAINING:
            return
        state, move.state, move.reason = move.state, MoveState.DRAINING, reason
        del self._moves[move.req.rid]
        self.failed += 1
        log.info("it is not moved: %s", reason, extra={"rid": move.req.rid})
        if state in (MoveState.FREEZING, MoveState.COMMITTED):
            self._scheduler.go_on(move.req)
        if tell and move.handover is not None:
            move.peer.send(MoveRefused(move.peer.epoch, move.handover, shown(reason, REASON_CHARS)))
        self._answer(MigrateResult(move.question, moved=False, message=reason))
        if move.hold is None:
            self._forget(move)
        else:
            assert move.handover is not None
            self._scheduler.outbox.to_worker(CancelSend(move.handover))

    def _forget(self, move: Move) -> None:
        if self._moves.get(move.req.rid) is move:
            del self._moves[move.req.rid]
        if move.handover is not None:
            self._rooms.pop(move.handover.room, None)
            if move.abort_asked:
                move.peer.send(AbortAck(move.peer.epoch, move.handover))
