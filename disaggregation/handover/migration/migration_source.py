"""Migration of running requests to another instance, and return of finished requests' KV to a prefill.

A ``Migration`` is one request::

    REACHING → OFFERED → PUSHING → LANDING → FREEZING → COMMITTED → (the request leaves this instance)
                  └─────────(no KV to take along)───────▲

The request keeps running until FREEZING. The whole pages that it has when it is offered are sent ahead. The other
instance recomputes what is written after that, a handful of tokens. So the request pauses for only a few steps, however
long it is. If anything fails before the other instance confirms that it has taken over, the request continues here and
has lost nothing. DRAINING: the migration has failed, and the worker may still read its pages.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import msgspec

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
from ....messages.question import RefusedAnswer
from ....messages.worker import CancelSend, SendEnded, SendPages, SendProgress
from ....scheduler.outbox import timing_at
from ....scheduler.req import Req, ReqState, Route
from ....scheduler.scheduler import Scheduler
from ..kv_sender import delivered_pages, digest_of
from ..limits import HandoverLimits
from ..peer import Peer, PeerState
from ..peer_router import Handlers, ignore

log = logging.getLogger(__name__)

COMMIT_SECONDS = 10.0
"""Time limit in seconds for the other instance to confirm that it has taken over.

It has everything that it needs, and the client waits.
"""


OFFER_SECONDS = 100.0
"""Time limit in seconds for the other instance to find memory."""
AGAIN_SECONDS = 1.0
"""Seconds before a request that could not migrate tries the next instance."""


KV_RETURN_SECONDS = 10.0
"""Time limit in seconds of a KV return. No client waits for it, and its pages are pinned here meanwhile."""
MAX_KV_RETURNS = 256
"""Maximum number of KV returns under way."""
ROWS_PER_KV_RETURN = 8
"""Running requests, of ``--max-running-requests``, for each KV return that may be under way."""
SPARE_PAGES = 4
"""Obtainable pages for each running request, below which no KV return starts and offered ones are given up."""


class MigrationState(Enum):
    """State of a ``Migration``; the module docstring draws the transitions."""

    REACHING = auto()
    OFFERED = auto()
    PUSHING = auto()
    LANDING = auto()
    FREEZING = auto()
    COMMITTED = auto()
    DRAINING = auto()


@dataclass(slots=True, eq=False)
class Migration:
    """State of one request that migrates to ``peer``, which is found at ``host`` and ``port``."""

    question: MigrateReq | None
    """Question to answer. None for a KV return, or if all requests migrate."""
    req: Req
    host: str
    port: int
    peer: Peer
    since: float
    deadline: float
    state: MigrationState = MigrationState.REACHING
    handover: HandoverId | None = None
    """Id of the hand-over. Set in OFFERED."""
    kv_len: int = 0
    """Tokens with KV that is sent ahead, less the prefix that the peer has according to ``asked``."""
    asked: TransferRequest | None = None
    """The peer's request for the KV. Set in PUSHING."""
    run: PageRun | None = None
    """Pages to push. Set in PUSHING."""
    landed: int = 0
    """Bytes that have landed, as last reported by the worker."""
    offered: int = 0
    """Number of tokens that were known when the request was offered."""
    hold: KVHold | None = None
    """The request's memory, pinned while it is pushed; that of a KV return from the beginning."""
    frozen_at: float = 0.0
    """Time at which the request was paused, 0 before that. Set in FREEZING."""
    abort_asked: bool = False
    """Whether the peer aborted the transfer and waits for an ``AbortAck``."""
    reason: str = ""
    """Why the migration failed. Set in DRAINING."""
    is_kv_return: bool = False
    """Whether this is a KV return: the request has finished, and only its KV is sent."""


class MigrationSource:
    """Owner of all migrations to other instances. ``reach`` returns the peer behind a bootstrap address."""

    def __init__(self, scheduler: Scheduler, limits: HandoverLimits, reach: Callable[[str, int, float], Peer]) -> None:
        self._scheduler = scheduler
        self._page_size = scheduler.options.page_size
        self._limits = limits
        self._reach = reach
        self._moves: dict[str, Migration] = {}
        """Migrations by request id, without failed ones and KV returns."""
        self._rooms: dict[int, Migration] = {}
        """Migrations that were offered to their peer, by room."""
        self._now = 0.0
        self._targets: deque[tuple[str, int]] = deque()
        """Bootstrap addresses that all requests migrate to, in rotation. Empty: they stay."""
        self._again_at: dict[str, float] = {}
        """Time of the next attempt, by the id of a request that could not migrate."""
        self._kv_returns: list[Migration] = []
        self._max_returns = min(MAX_KV_RETURNS, scheduler.options.max_running_requests // ROWS_PER_KV_RETURN)
        self.done = 0
        self.failed = 0
        self.given = 0
        self.paused_seconds = 0.0

    # --- starting a migration ---

    def give_back(self, req: Req) -> None:
        """Offer the KV of a request that is about to finish to the prefill that computed its prompt."""
        where, hold = req.msg.bootstrap, req.hold
        computed = min(req.computed, req.known_len) // self._page_size * self._page_size
        is_known = where is not None and not where.source  # else no request there can find it
        if (
            hold is None
            or not hold.verified
            or not is_known
            or computed <= req.prompt_len // self._page_size * self._page_size
        ):
            return
        if len(self._kv_returns) >= self._max_returns or self._scheduler.draining or self._memory_is_wanted():
            return
        assert where is not None
        peer = self._reach(where.host, where.port, self._now)
        deadline = self._now + KV_RETURN_SECONDS
        move = Migration(
            None, req, where.host, where.port, peer, self._now, deadline, kv_len=computed, is_kv_return=True
        )
        # Enter the prefix cache here at once, not only when the KV return is complete.
        self._scheduler.memory.share(req, computed)
        move.hold = self._scheduler.memory.pinned.pin(req)
        self._kv_returns.append(move)

    def _memory_is_wanted(self) -> bool:
        """Return whether requests need the memory: one waits for it, or running ones may soon lack it.

        Their needs come before KV returns.
        """
        planner, memory = self._scheduler.planner, self._scheduler.memory
        waits = any(req.times.ready for req in planner.waiting.values())
        return waits or memory.pool.obtainable < SPARE_PAGES * self._page_size * max(1, len(planner.running))

    def _offer_return(self, move: Migration) -> None:
        req, peer = move.req, move.peer
        move.handover = HandoverId(peer.epoch, secrets.randbits(63), 0)
        move.state = MigrationState.OFFERED
        self._rooms[move.handover.room] = move
        sampling = msgspec.structs.replace(req.msg.sampling, max_new_tokens=1, min_new_tokens=0)
        tokens = req.token_ids[: move.kv_len].tobytes()
        request = msgspec.structs.replace(req.msg, input_ids=tokens, sampling=sampling, logprobs=None, bootstrap=None)
        peer.send(MoveOffer(peer.epoch, move.handover, RunningRequest(request, b"", 1, 0.0), move.kv_len, keep=True))

    def move_all(self, to: Iterable[tuple[str, int]]) -> None:
        """Migrate all requests, as soon as each one can leave, to the instances behind these bootstrap addresses."""
        self._targets = deque(to)

    def _move_more(self, now: float) -> None:
        for req in list(self._scheduler.reqs.values()):
            is_here = req.route is not Route.OUTGOING and req.rid not in self._moves
            if is_here and self._can_leave(req) and now >= self._again_at.get(req.rid, 0.0):
                self._targets.rotate(-1)
                host, port = self._targets[-1]
                self._begin(None, req, host, port, now)

    def migrate(self, ask: MigrateReq, now: float) -> None:
        """Migrate a request. The answer is sent when it has moved or cannot be moved."""
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
            self._scheduler.outbox.reply(ask, RefusedAnswer(409, problem))
            return
        assert req is not None
        self._begin(ask, req, ask.host, ask.port, now)

    def _begin(self, question: MigrateReq | None, req: Req, host: str, port: int, now: float) -> None:
        peer = self._reach(host, port, now)
        self._moves[req.rid] = Migration(question, req, host, port, peer, now, now + self._limits.bootstrap)

    def advance(self, now: float) -> None:
        """Advance every migration that can advance, and fail those past their deadline."""
        self._now = now
        if self._targets:
            self._move_more(now)
        if self._kv_returns and self._memory_is_wanted():
            states = (MigrationState.REACHING, MigrationState.OFFERED)
            for returned in [returned for returned in self._kv_returns if returned.state in states]:
                self._fail(returned, "others need the memory")
        for move in [*self._moves.values(), *self._kv_returns]:
            if move.req.is_ended and not move.is_kv_return:
                self._fail(move, "the request has ended")
            elif move.state is MigrationState.REACHING:
                self._when_reached(move, now)
            elif move.state is MigrationState.FREEZING and not move.req.pending:
                self._commit(move, now)
            if move.state is not MigrationState.DRAINING and now > move.deadline:
                self._fail(move, f"it took too long ({move.state.name.lower()})")

    def _when_reached(self, move: Migration, now: float) -> None:
        if move.peer.same_as is not None:
            move.peer = move.peer.same_as
        if move.peer.gone:
            self._fail(move, f"the instance can't be used: {move.peer.reason}")
        elif move.peer.state is PeerState.OPEN and move.is_kv_return:
            self._offer_return(move)
        elif move.peer.state is PeerState.OPEN and self._can_leave(move.req):
            self._offer(move, now)

    @staticmethod
    def _can_leave(req: Req) -> bool:
        """Return whether a request can be offered now.

        A running one needs output; a waiting one must have no memory and nothing pending in a step.
        """
        if req.state is ReqState.RUNNING:
            return bool(req.output_len)
        return req.state is ReqState.WAITING and req.hold is None and not req.pending

    def _offer(self, move: Migration, now: float) -> None:
        req, peer = move.req, move.peer
        move.handover = HandoverId(peer.epoch, secrets.randbits(63), 0)
        computed = min(req.computed, req.known_len) if req.hold is not None else 0
        move.kv_len = computed // self._page_size * self._page_size
        move.offered = req.known_len
        move.state = MigrationState.OFFERED
        # If all requests migrate, the next instance is tried instead of waiting long for this one.
        move.deadline = now + min(OFFER_SECONDS, self._limits.bootstrap if move.question is None else OFFER_SECONDS)
        self._rooms[move.handover.room] = move
        # Its own hand-over and the request that it forked from do not concern the other instance.
        request = msgspec.structs.replace(req.msg, bootstrap=None, fork_of="")
        output = req.token_ids[req.prompt_len : req.known_len].tobytes()
        running = RunningRequest(request, output, req.max_new_tokens, max(0.0, now - req.times.arrival))
        peer.send(MoveOffer(peer.epoch, move.handover, running, move.kv_len))

    # --- the other instance answers ---

    def knows(self, handover: HandoverId) -> bool:
        """Return whether this hand-over belongs to a migration or KV return from here."""
        move = self._rooms.get(handover.room)
        return move is not None and move.handover == handover

    def handlers(self) -> Handlers:
        """Return the handlers of the messages that the targets of migrations send."""
        return {
            TransferRequest: self.on_request,
            Abort: self.on_abort,
            RoomQueued: ignore,  # the offer came from this instance
            MoveReady: self.on_ready,
            MoveTaken: self.on_taken,
            MoveRefused: self.on_refused,
        }

    def on_request(self, peer: Peer, msg: TransferRequest, now: float) -> None:
        """Push the KV to the other instance, which has memory and asks for it."""
        move = self._of(peer, msg.handover)
        if move is None or move.state is not MigrationState.OFFERED:
            return
        memory = self._scheduler.memory
        run = memory.pinned.run(msg.decode_prefix_len, move.kv_len, goes_on=move.kv_len)
        problem = self._mismatch(move, msg, run)
        hold = move.hold or move.req.hold
        if problem is None and hold is not None and not memory.pinned.keep_window(hold, run):
            problem = "it has moved on meanwhile, and what its windows held is needed for other requests"
        if problem is not None:
            peer.send(TransferFailed(peer.epoch, msg.handover, 409, problem))
            self._fail(move, problem)
            return
        move.state, move.deadline = MigrationState.PUSHING, self._now + self._limits.transfer
        move.asked, move.run = msg, run
        if move.hold is None:
            move.hold = memory.pinned.pin(move.req)
        src = [pack_i32(pages) for pages in memory.pinned.pages_in(move.hold, run, run.begin, run.end)]
        # Queued in the order of the steps, so that the steps that compute these pages run first.
        push = SendPages(msg.handover, src, msg.dst_pages, last=True, checksum=msg.checksum)
        self._scheduler.outbox.to_worker(push)

    def _mismatch(self, move: Migration, msg: TransferRequest, run: PageRun) -> str | None:
        req, skipped = move.req, msg.decode_prefix_len
        if not move.is_kv_return and (req.hold is None or req.computed < move.kv_len):
            return "its memory was taken meanwhile, for other requests"
        if msg.prompt_len != move.kv_len or msg.prompt_digest != digest_of(req, move.kv_len):
            return "the other instance means another request"
        bad_prefix = skipped % self._page_size or not 0 <= skipped <= move.kv_len
        if bad_prefix or [len(pages) // 4 for pages in msg.dst_pages] != run.counts:
            return "the other instance offers other pages than are needed"
        return None

    def on_progress(self, event: SendProgress) -> None:
        """Restart a migration's time limit when more of its pages have landed, here and at the other instance."""
        move = self._rooms.get(event.handover.room)
        if move is None or move.handover != event.handover or move.state is not MigrationState.PUSHING:
            return
        if event.nbytes > move.landed:
            assert move.run is not None
            move.landed, move.deadline = event.nbytes, self._now + self._limits.transfer
            pages = delivered_pages(self._scheduler.worker.layout, move.run, move.landed)
            move.peer.send(Progress(move.peer.epoch, event.handover, pages))

    def on_send_ended(self, event: SendEnded) -> None:
        """Release the pages of a hand-over, which the worker will not touch again."""
        move = self._rooms.get(event.handover.room)
        if move is None or move.handover != event.handover or move.hold is None:
            return
        if move.state is MigrationState.DRAINING and not event.cancelled:
            return  # it crossed our CancelSend; the answer to that is under way and must find this migration
        self._let_go_of(move)
        if move.state is MigrationState.DRAINING:
            self._forget(move)
        elif event.error is not None or event.cancelled:
            reason = f"the KV transfer failed: {event.error or 'cancelled'}"
            move.peer.send(TransferFailed(move.peer.epoch, event.handover, 502, shown(reason, REASON_CHARS)))
            self._fail(move, reason)
        else:
            move.state, move.deadline = MigrationState.LANDING, self._now + self._limits.transfer
            timing = Timing(transfer_ms=event.seconds * 1000, transfer_bytes=event.nbytes)
            debug, asked, hashes = self._scheduler.memory.debug, move.asked, b""
            if asked is not None and asked.hashes:
                first = asked.decode_prefix_len // self._page_size
                hashes = debug.told(move.req, first, move.kv_len // self._page_size)
            move.peer.send(TransferDone(move.peer.epoch, event.handover, event.slices, timing, hashes))
            if move.is_kv_return:
                self.given += 1
                self._forget(move)

    def on_ready(self, peer: Peer, msg: MoveReady, now: float) -> None:
        """Pause the request here: the other instance is ready to continue it."""
        move = self._of(peer, msg.handover)
        if move is None:
            return
        if move.is_kv_return:
            return
        if move.state is MigrationState.LANDING or (move.state is MigrationState.OFFERED and not move.kv_len):
            move.state, move.frozen_at = MigrationState.FREEZING, self._now
            move.deadline = self._now + COMMIT_SECONDS
            self._scheduler.peer_requests.hold_back(move.req)

    def _commit(self, move: Migration, now: float) -> None:
        req, peer = move.req, move.peer
        assert move.handover is not None
        move.state = MigrationState.COMMITTED
        commit = MoveCommit(
            peer.epoch,
            move.handover,
            output=req.token_ids[move.offered : req.known_len].tobytes(),
            cached_tokens=req.cached_tokens,
            retractions=req.retractions,
            first_token_age=max(0.0, now - req.times.first_token) if req.times.first_token else 0.0,
            timing=timing_at(req, now),
            logprobs=req.logprobs,
            input_logprobs=req.input_logprobs,
            cached_beyond=req.cached_beyond,
        )
        peer.send(commit)

    def on_taken(self, peer: Peer, msg: MoveTaken, now: float) -> None:
        """End the request here: the other instance has taken it over."""
        move = self._of(peer, msg.handover)
        if move is None or move.state is not MigrationState.COMMITTED:
            return
        req = move.req
        self._forget(move)
        self.done += 1
        self.paused_seconds += now - move.frozen_at
        paused_ms = (now - move.frozen_at) * 1000
        log.info(
            "it goes on at %s:%d, and stood still for %.1f ms", move.host, msg.port, paused_ms, extra={"rid": req.rid}
        )
        self._scheduler.peer_requests.leave_moved(req, ReqMoved(req.rid, peer.epoch, move.host, msg.port, msg.key))
        self._answer(move, MigrateResult(paused_ms))

    # --- the ways out ---

    def on_refused(self, peer: Peer, msg: MoveRefused, now: float) -> None:
        """Fail a migration that the other instance refuses."""
        move = self._of(peer, msg.handover)
        if move is not None and move.state is not MigrationState.DRAINING:
            self._fail(move, f"the other instance does not take it: {shown(msg.reason, REASON_CHARS)}", tell=False)

    def on_too_long(self, peer: Peer, msg: MoveOffer | MoveCommit) -> None:
        """Fail a migration with a message that exceeds the peer's frame limit."""
        move = self._of(peer, msg.handover)
        if move is not None:
            self._fail(move, "its tokens or logprobs are more than one message may hold")

    def on_abort(self, peer: Peer, msg: Abort, now: float) -> None:
        """Fail a migration that the other instance aborts, and acknowledge it when nothing is written any more."""
        move = self._of(peer, msg.handover)
        if move is None or move.hold is None:
            peer.send(AbortAck(peer.epoch, msg.handover))
        else:
            move.abort_asked = True
        if move is not None:
            self._fail(move, f"the other instance gave up: {shown(msg.reason, REASON_CHARS)}")

    def on_gone(self, peer: Peer) -> None:
        """Fail all migrations to an instance that died or fell silent."""
        for move in [move for move in self._all() if move.peer is peer]:
            self._fail(move, f"the other instance is gone: {peer.reason}")

    def cancel(self, req: Req, reason: str) -> None:
        """Fail the migration of a request that ended here."""
        move = self._moves.get(req.rid)
        if move is not None and move.req is req:
            self._fail(move, f"the request has ended: {reason}")

    def pinned(self) -> list[KVHold]:
        """Return memory that the worker may still read."""
        return [m.hold for m in self._all() if m.hold is not None]

    def _all(self) -> Iterable[Migration]:
        return {id(m): m for m in (*self._moves.values(), *self._kv_returns, *self._rooms.values())}.values()

    def info(self, now: float) -> list[dict[str, Any]]:
        """Return the open migrations for ``/transfers``."""
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
            for move in self._all()
        ]

    def _of(self, peer: Peer, handover: HandoverId) -> Migration | None:
        move = self._rooms.get(handover.room)
        return move if move is not None and move.handover == handover and move.peer is peer else None

    def _answer(self, move: Migration, answer: MigrateResult | RefusedAnswer) -> None:
        if move.question is not None:
            self._scheduler.outbox.reply(move.question, answer)

    def _fail(self, move: Migration, reason: str, *, tell: bool = True) -> None:
        """End a migration without success. A paused request continues here.

        ``tell``: notify the peer, if it knows of the migration.
        """
        if move.state is MigrationState.DRAINING:
            return
        state, move.state, move.reason = move.state, MigrationState.DRAINING, reason
        if move.is_kv_return:
            log.debug("its KV is not given back: %s", reason, extra={"rid": move.req.rid})
        else:
            del self._moves[move.req.rid]
            self.failed += 1
            log.info("it is not moved: %s", reason, extra={"rid": move.req.rid})
        if state in (MigrationState.FREEZING, MigrationState.COMMITTED):
            self._scheduler.peer_requests.go_on(move.req)
        if tell and move.handover is not None:
            move.peer.send(MoveRefused(move.peer.epoch, move.handover, shown(reason, REASON_CHARS)))
        self._answer(move, RefusedAnswer(409, reason))
        if self._targets and not move.req.is_ended:
            self._again_at[move.req.rid] = self._now + AGAIN_SECONDS
        if move.hold is not None and state is not MigrationState.PUSHING:
            self._let_go_of(move)  # the worker does not read it
        if move.hold is None:
            self._forget(move)
        else:
            assert move.handover is not None
            self._scheduler.outbox.to_worker(CancelSend(move.handover))

    def _let_go_of(self, move: Migration) -> None:
        """Unpin the memory of a migration, which the worker does not read any more."""
        hold, move.hold = move.hold, None
        assert hold is not None
        self._scheduler.memory.pinned.let_window_go(hold)
        self._scheduler.memory.pinned.unpin(hold)

    def _forget(self, move: Migration) -> None:
        if self._moves.get(move.req.rid) is move:
            del self._moves[move.req.rid]
        if move.is_kv_return:
            self._kv_returns.remove(move)
        if move.handover is not None:
            self._rooms.pop(move.handover.room, None)
            if move.abort_asked:
                move.peer.send(AbortAck(move.peer.epoch, move.handover))
