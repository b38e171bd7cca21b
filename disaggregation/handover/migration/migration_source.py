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
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from ....messages.base import HandoverId
from ....messages.moves import (
    MigrateReq,
    MigrateResult,
    MoveCommit,
    MoveOffer,
    MoveTaken,
    ReqMoved,
    RunningRequest,
)
from ....messages.question import RefusedAnswer
from ....scheduler.outbox import timing_at
from ....scheduler.req import Req, ReqState, Route
from ....scheduler.scheduler import Scheduler
from ..limits import HandoverLimits
from ..peer import Peer
from ..peer_dispatcher import Handlers
from .kv_returns import KVReturns
from .migration import Migration, MigrationState, Pause
from .migration_rooms import MigrationRooms

log = logging.getLogger(__name__)

COMMIT_SECONDS = 10.0
"""Time limit in seconds for the other instance to confirm that it has taken over.

It has everything that it needs, and the client waits.
"""


OFFER_SECONDS = 100.0
"""Time limit in seconds for the other instance to find memory."""
AGAIN_SECONDS = 1.0
"""Seconds before a request that could not migrate tries the next instance."""


class MigrationSource:
    """The ``MigrationOwner`` of running requests. ``reach`` returns the peer behind a bootstrap address."""

    def __init__(self, scheduler: Scheduler, limits: HandoverLimits, reach: Callable[[str, int, float], Peer]) -> None:
        self._scheduler = scheduler
        self._page_size = scheduler.options.page_size
        self._limits = limits
        self._reach = reach
        self.rooms = MigrationRooms(scheduler, limits)
        self.returns = KVReturns(scheduler, self.rooms, reach)
        self._moves: dict[str, Migration] = {}
        """Migrations by request id, without failed ones."""
        self._now = 0.0
        self._targets: deque[tuple[str, int]] = deque()
        """Bootstrap addresses that all requests migrate to, in rotation. Empty: they stay."""
        self._again_at: dict[str, float] = {}
        """Time of the next attempt, by the id of a request that could not migrate."""
        self.done = 0
        self.failed = 0
        self.paused_seconds = 0.0

    # --- starting a migration ---

    def move_all(self, to: Iterable[tuple[str, int]]) -> None:
        """Set the bootstrap addresses (host, port) to which all requests migrate, in rotation; ``advance`` starts them.

        Each request migrates as soon as it can be offered. Without addresses, no more migrations start.
        """
        self._targets = deque(to)

    def _move_more(self, now: float) -> None:
        for req in list(self._scheduler.reqs.values()):
            is_here = self._problem(req) is None
            if is_here and self._can_leave(req) and now >= self._again_at.get(req.rid, 0.0):
                self._targets.rotate(-1)
                host, port = self._targets[-1]
                self._begin(None, req, host, port, now)

    def migrate(self, ask: MigrateReq, now: float) -> None:
        """Begin to migrate a request. The answer to ``ask`` is sent when it has moved, or with 409 when it cannot be
        moved.
        """
        self._set_time(now)
        req = self._scheduler.reqs.get(ask.rid)
        if req is None:
            self._scheduler.outbox.reply(ask, RefusedAnswer(409, f"no request {ask.rid!r} is running here"))
        elif (problem := self._problem(req)) is not None:
            self._scheduler.outbox.reply(ask, RefusedAnswer(409, problem))
        else:
            self._begin(ask, req, ask.host, ask.port, now)

    def _problem(self, req: Req) -> str | None:
        """Return why a request cannot migrate, or None."""
        if req.rid in self._moves:
            return f"request {req.rid!r} is being moved already"
        if req.route is Route.OUTGOING:
            return f"request {req.rid!r} is computed for another instance, and ends here by itself"
        if req.msg.readout.is_wanted:
            return f"request {req.rid!r} ends here with its prompt"
        return None

    def _begin(self, question: MigrateReq | None, req: Req, host: str, port: int, now: float) -> None:
        deadline = now + self._limits.bootstrap
        move = Migration(self, req, host, self._reach(host, port, now), now, deadline, question)
        self._moves[req.rid] = move
        self.rooms.add(move)

    def _set_time(self, now: float) -> None:
        self._now = now
        self.rooms.set_time(now)

    def advance(self, now: float) -> None:
        """Advance every migration and KV return that can advance, and fail those past their deadline."""
        self._set_time(now)
        if self._targets:
            self._move_more(now)
        self.returns.make_room(now)
        for move in list(self._moves.values()):
            if move.req.is_ended:
                self.rooms.fail(move, "the request has ended")
            elif move.state is MigrationState.REACHING:
                self.rooms.when_reached(move, now)
            elif move.state is MigrationState.FREEZING and move.pause is not None and not move.req.pending:
                self._commit(move, move.pause.handover, now)
            self.rooms.check_deadline(move, now)
        self.returns.advance(now)

    @staticmethod
    def _can_leave(req: Req) -> bool:
        """Return whether a request can be offered to another instance now.

        A running one needs output; a waiting one must have no memory and no token pending in a step.
        """
        if req.state is ReqState.RUNNING:
            return bool(req.output_len)
        return req.state is ReqState.WAITING and req.hold is None and not req.pending

    # --- MigrationOwner ---

    def on_reached(self, move: Migration, now: float) -> None:
        """Offer the request to the connected peer if it can leave now; otherwise a later tick tries again."""
        req, peer = move.req, move.peer
        if not self._can_leave(req):
            return
        handover = self.rooms.draw_id(move)
        computed = min(req.computed, req.known_len) if req.hold is not None else 0
        move.kv_len = computed // self._page_size * self._page_size
        move.offered = req.known_len
        # If all requests migrate, the next instance is tried instead of waiting long for this one.
        move.deadline = now + min(OFFER_SECONDS, self._limits.bootstrap if move.question is None else OFFER_SECONDS)
        # Its own hand-over and the request that it forked from do not concern the other instance.
        request = msgspec.structs.replace(req.msg, bootstrap=None, fork_of="")
        output = req.token_ids[req.prompt_len : req.known_len].tobytes()
        running = RunningRequest(request, output, req.max_new_tokens, max(0.0, now - req.times.arrival))
        peer.send(MoveOffer(peer.epoch, handover, running, move.kv_len))

    def on_sent(self, move: Migration) -> None:
        """Do nothing: the other instance sends ``MoveReady`` when it can continue the request."""

    def on_ready(self, move: Migration, handover: HandoverId, now: float) -> None:
        """Pause the request here, as the other instance is ready to continue it. ``advance`` sends the rest of its
        state.
        """
        if move.state is MigrationState.LANDING or (move.state is MigrationState.OFFERED and not move.kv_len):
            move.state, move.pause = MigrationState.FREEZING, Pause(handover, now)
            move.deadline = now + COMMIT_SECONDS
            self._scheduler.peer_requests.hold_back(move.req)

    def on_failed(self, move: Migration, state: MigrationState, reason: str) -> None:
        """Continue the request here if it was paused, and answer the order to migrate it with 409 and ``reason``.

        If all requests migrate, the next instance is tried a little later.
        """
        del self._moves[move.req.rid]
        self.failed += 1
        log.info("it is not moved: %s", reason, extra={"rid": move.req.rid})
        if state in (MigrationState.FREEZING, MigrationState.COMMITTED):
            self._scheduler.peer_requests.go_on(move.req)
        self._answer(move, RefusedAnswer(409, reason))
        if self._targets and not move.req.is_ended:
            self._again_at[move.req.rid] = self._now + AGAIN_SECONDS

    def on_over(self, move: Migration) -> None:
        """Remove the migration from the open ones. Do nothing if it failed and was removed then."""
        if self._moves.get(move.req.rid) is move:
            del self._moves[move.req.rid]

    # --- the other instance takes over ---

    def handlers(self) -> Handlers:
        """Return the handlers of the messages that the targets of migrations send."""
        return {**self.rooms.handlers(), MoveTaken: self.on_taken}

    def _commit(self, move: Migration, handover: HandoverId, now: float) -> None:
        req, peer = move.req, move.peer
        move.state = MigrationState.COMMITTED
        commit = MoveCommit(
            peer.epoch,
            handover,
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
        """End the request here, since the other instance has taken it over, and tell its client where it continues."""
        move = self.rooms.of(peer, msg.handover)
        if move is None or move.pause is None or move.state is not MigrationState.COMMITTED:
            return
        req = move.req
        self.rooms.forget(move)
        self.done += 1
        self.paused_seconds += now - move.pause.since
        paused_ms = (now - move.pause.since) * 1000
        log.info(
            "it goes on at %s:%d, and stood still for %.1f ms", move.host, msg.port, paused_ms, extra={"rid": req.rid}
        )
        self._scheduler.peer_requests.leave_moved(req, ReqMoved(req.rid, peer.epoch, move.host, msg.port, msg.key))
        self._answer(move, MigrateResult(paused_ms))

    def cancel(self, req: Req, reason: str) -> None:
        """Fail the migration of a request that has ended here for ``reason``. Do nothing if it has no migration."""
        move = self._moves.get(req.rid)
        if move is not None and move.req is req:
            self.rooms.fail(move, f"the request has ended: {reason}")

    def _answer(self, move: Migration, answer: MigrateResult | RefusedAnswer) -> None:
        if move.question is not None:
            self._scheduler.outbox.reply(move.question, answer)
