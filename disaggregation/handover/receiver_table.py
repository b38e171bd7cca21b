"""Hand-overs on the decode instance.

A ``KVReceiver`` is one hand-over, named by its bootstrap room::

    LINKING → QUEUED → PREALLOCATED → TRANSFERRING → VERIFYING → (the request runs)
       └────────┴───────────┤             └──────────────┴──▶ DRAINING → (memory freed)
                            └──▶ DECLINED (the prompt is computed here)

- LINKING waits until the prefill instance is connected.
- QUEUED waits for memory. ``scheduler/claims.py`` decides which room is next. It also decides which room goes back to
  QUEUED because its prefill does not begin.
- PREALLOCATED waits for up to three things:

  - The steps that were under way when its pages were allocated. They may still write to the pages (see
    ``scheduler/kv_pool.py``), and a remote writer must come after them.
  - The prefill's forecast, if the placement depends on it (``placement_policy.py``). The forecast is not used before
    this state, because only with memory can either instance begin.
  - The pages of the prompt in this instance's own store (``store_first.py``).

- DECLINED is a room with a prompt that is computed here. It stays open until the prefill is notified.
- DRAINING is a room that ended while the prefill may still write. Its pages are freed when the prefill confirms that it
  will not write, or when its link is down for good. A worker that checks the pages may rewrite them in its own order;
  until it answers, they are not freed.

KV with a wrong checksum, room or epoch never reaches the model.

The first token arrives before the KV, in TRANSFERRING, and goes to the client at once. So a request may end before its
KV has arrived; the KV then stays in the cache for other requests. If a room fails after its first token, the prompt is
computed here.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from ...mem_cache.base_prefix_cache import KVHold
from ...messages.base import REASON_CHARS, HandoverId, pack_i32
from ...messages.decode import shown
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
from ...messages.outputs import FinishReason, FinishType, Phase
from ...messages.worker import MAX_PAGES, GrantPages, PagesVerified, RevokePages, VerifyPages
from ...runtime.metrics import Metrics, counter, gauge
from ...scheduler.req import Req, ReqState, Route
from ...scheduler.scheduler import Scheduler
from .kv_receiver import KVReceiver, Newcomer, ReceiverState, StoreStage, first_token_problem, take_times, too_late, why
from .kv_sender import digest_of
from .limits import HandoverLimits
from .peer import Peer
from .peer_router import Handlers
from .placement_policy import PlacementPolicy
from .store_first import StoreFirst

log = logging.getLogger(__name__)

CLIENT_GONE = 499
"""HTTP status of a request that its client left or aborted."""
STUCK_SECONDS = 10.0
"""Seconds after which an operator is warned of memory that a peer still holds."""
MOST_UNTOLD = 1024
"""Maximum DECLINED rooms that wait to notify their prefill. Prefills of further rooms run into their own time limit."""


class ReceiverTable:
    """Owner of all hand-overs to this instance, by bootstrap room."""

    def __init__(
        self,
        scheduler: Scheduler,
        epoch: str,
        limits: HandoverLimits,
        peer_at: Callable[[str, int, float], Peer],
        choice: PlacementPolicy,
    ) -> None:
        self._vocab_size = scheduler.worker.vocab_size
        self._checksum = not scheduler.options.disable_handover_checksum
        self._scheduler = scheduler
        self._epoch = epoch
        self._limits = limits
        self._peer_at = peer_at
        self._choice = choice
        self._claims = scheduler.planner.claims
        self.store_first = StoreFirst(scheduler, choice)
        self._attempts = itertools.count(1)
        self._now = 0.0
        self.rooms: dict[int, KVReceiver] = {}
        self.done = 0
        self.failed = 0
        self.recomputed = 0
        self.withdrawn = 0
        """Number of times a room gave its memory back because its prefill had not begun."""
        self.bytes_received = 0

    def add(self, req: Req, now: float) -> None:
        """Open a room for a client's request that names a prefill instance."""
        where = req.msg.bootstrap
        assert where is not None
        if where.room in self.rooms:
            text = f"bootstrap_room {where.room} is in use; draw a fresh one for every request"
            self._scheduler.fail(req, 400, text, "invalid_request_error")
            return
        peer = self._peer_at(where.host, where.port, now)
        deadline = now + self._limits.bootstrap
        handover = HandoverId(self._epoch, where.room, next(self._attempts))
        receiver = KVReceiver(handover, req, peer, ReceiverState.LINKING, now, deadline, length=req.prompt_len)
        self.rooms[where.room] = receiver
        receiver.decided = not self._choice.asks
        if self._choice.is_short(req):
            self._compute_here(receiver, now)

    def add_newcomer(
        self, req: Req, peer: Peer, handover: HandoverId, length: int, newcomer: Newcomer, now: float
    ) -> None:
        """Open a room for a request that ``peer`` offers, with the KV of its first ``length`` tokens."""
        receiver = KVReceiver(
            handover, req, peer, ReceiverState.LINKING, now, now + self._limits.bootstrap, length, newcomer
        )
        self.rooms[handover.room] = receiver

    def advance(self, now: float) -> None:
        """Advance every room that can advance, and fail those past their deadline."""
        self._now = now
        for receiver in list(self.rooms.values()):
            if receiver.state is ReceiverState.LINKING:
                self._when_linked(receiver, now)
            elif receiver.state is ReceiverState.DECLINED:
                self._tell_declined(receiver, now)
            if receiver.state not in (ReceiverState.DRAINING, ReceiverState.DECLINED) and now > receiver.deadline:
                self._fail(receiver, 504, too_late(receiver, self._limits))
        self._take_memory(now)
        self._ask_back(now)
        for receiver in self._in(ReceiverState.PREALLOCATED):
            self._decide(receiver, now)
            if receiver.state is ReceiverState.PREALLOCATED and receiver.knows_what_to_ask:
                self._expect(receiver)
                if self._scheduler.memory.pinned.is_past(receiver.fence, self._scheduler.completed_step):
                    self._request(receiver, now)

    # --- here or there ---

    def handlers(self) -> Handlers:
        """Return the handlers of the messages that the senders of KV send."""
        return {
            Forecast: self.on_forecast,
            Progress: self.on_progress,
            FirstToken: self.on_first_token,
            TransferDone: self.on_done,
            TransferFailed: self.on_failed,
            Withdrawn: self.on_withdrawn,
            AbortAck: self.on_abort_ack,
        }

    def on_forecast(self, peer: Peer, msg: Forecast, now: float) -> None:
        """Record the prefill's forecast of its time to the first token, in milliseconds."""
        receiver = self._known(peer, msg.handover)
        # A room that gave its memory back is QUEUED and still takes the forecast: a prefill sends one for each room.
        states = (ReceiverState.QUEUED, ReceiverState.PREALLOCATED)
        if receiver is not None and not receiver.decided and receiver.state in states:
            receiver.there_ms = msg.ms

    def _decide(self, receiver: KVReceiver, now: float) -> None:
        """Decide which instance computes the prompt, once it is known what this instance's store supplies."""
        if receiver.store is StoreStage.NEW:
            self.store_first.look(receiver, now)
            if not receiver.decided and receiver.there_ms is None:
                receiver.peer.send(ForecastRequest(receiver.peer.epoch, receiver.handover))
        if (there_ms := receiver.there_ms) is None and not receiver.decided:
            return
        if self.store_first.holds_up(receiver, now) or receiver.decided or there_ms is None:
            return
        receiver.decided = True
        req, memory = receiver.req, self._scheduler.memory
        pages = memory.pool.pages_up(req.prompt_len - receiver.prefix_len) // memory.pool.page_size
        if self._choice.is_here(req, receiver.peer.epoch, there_ms, receiver.prefix_len, pages, now):
            self._compute_here(receiver, now)
            self._tell_declined(receiver, now)

    def _compute_here(self, receiver: KVReceiver, now: float) -> None:
        """Compute the prompt here. Its KV has not been asked for, and no peer may write to its memory."""
        receiver.state, receiver.decided = ReceiverState.DECLINED, True
        receiver.deadline = now + self._limits.bootstrap
        if receiver.hold is None:
            self._scheduler.peer_requests.recompute(receiver.req, now)
            return
        receiver.hold.verified = True
        self._scheduler.memory.pinned.unpin(receiver.hold)
        receiver.hold = None
        self._scheduler.peer_requests.compute_here(receiver.req, now)

    def _tell_declined(self, receiver: KVReceiver, now: float) -> None:
        """Notify the prefill that the prompt is computed here, then close the room.

        A prefill that can't be reached has a time limit of its own.
        """
        if receiver.peer.same_as is not None:
            receiver.peer = receiver.peer.same_as
        peer = receiver.peer
        if peer.readable:
            peer.send(Declined(peer.epoch, receiver.handover))
        elif now <= receiver.deadline and len(self._in(ReceiverState.DECLINED)) <= MOST_UNTOLD:
            where = receiver.req.msg.bootstrap
            if not peer.gone:
                return
            if where is not None and not receiver.tried_again:
                receiver.tried_again = True
                receiver.peer = self._peer_at(where.host, where.port, now)
                return
        del self.rooms[receiver.handover.room]

    def _when_linked(self, receiver: KVReceiver, now: float) -> None:
        if receiver.peer.same_as is not None:
            receiver.peer = receiver.peer.same_as
        peer = receiver.peer
        if peer.gone:
            self._fail(receiver, peer.status, why(peer))
        elif peer.readable:
            receiver.queued_at = now
            self._queue(receiver, now)
            # If the prompt may be computed here, the cached prefix must leave at least one token to compute.
            most = receiver.length if receiver.decided else min(receiver.length, receiver.req.longest_reusable_prefix)
            self._claims.add_incoming(receiver.req, most, optional=receiver.newcomer is not None)

    def _queue(self, receiver: KVReceiver, now: float) -> None:
        receiver.state = ReceiverState.QUEUED
        if receiver.req.rid in self._scheduler.planner.arriving:
            receiver.req.times.ready = now  # not for returned KV: no client waits for it
        # The limit counts from the first time in QUEUED, so a room that keeps giving its memory back ends, too.
        receiver.deadline = receiver.queued_at + self._limits.queue
        receiver.peer.send(RoomQueued(receiver.peer.epoch, receiver.handover))

    def _take_memory(self, now: float) -> None:
        memory = self._scheduler.memory
        for req in self._scheduler.planner.grant_incoming(now):
            receiver = self._of(req)
            assert receiver is not None
            if receiver.newcomer is None and not receiver.allocated_at:
                self._scheduler.planner.count_lookup(req)
            receiver.state, req.state = ReceiverState.PREALLOCATED, ReqState.PREALLOCATED
            receiver.allocated_at = now
            receiver.fence, receiver.hold = memory.pinned.fence(), memory.pinned.pin(req)
            receiver.prefix_len = req.computed
            receiver.deadline = now + self._limits.landing

    def _ask_back(self, now: float) -> None:
        """Revoke memory that other requests need and no prefill has begun to use."""
        for req in self._claims.to_revoke(now):
            receiver = self._of(req)
            if receiver is None:
                continue
            if receiver.state is ReceiverState.PREALLOCATED:  # the prefill does not know its pages
                self.store_first.start_over(receiver)
                self._queue_again(receiver, now)
            elif receiver.state is ReceiverState.TRANSFERRING and receiver.peer.readable:
                receiver.peer.send(Withdraw(receiver.peer.epoch, receiver.handover))

    def on_withdrawn(self, peer: Peer, msg: Withdrawn, now: float) -> None:
        """Queue the room again if its prefill has not begun. The prefill then waits for another request."""
        receiver = self._known(peer, msg.handover)
        if receiver is None or receiver.state is not ReceiverState.TRANSFERRING:
            return
        req = receiver.req
        if receiver.begun or not self._claims.is_asked_back(req.rid):
            return
        if msg.begun:
            self._claims.began(req.rid)
            return
        self._revoke(receiver)
        # The store was read and the placement was decided before, so neither is done again.
        receiver.store, receiver.decided = StoreStage.OVER, True
        receiver.handover = HandoverId(self._epoch, receiver.handover.room, next(self._attempts))
        req.foreseen = None
        # Since it was asked for, the request was in the prefill's queue.
        req.phases.credit(math.inf, 0.0, 0.0, now)
        req.phases.enter(Phase.QUEUE, now)
        self._queue_again(receiver, now)

    def _queue_again(self, receiver: KVReceiver, now: float) -> None:
        """Free the memory of a room that no prefill may write to, and queue its claim again."""
        req, memory = receiver.req, self._scheduler.memory
        assert receiver.hold is not None
        memory.finish(req)
        memory.pinned.unpin(receiver.hold)
        receiver.hold, receiver.pages, receiver.expects, req.computed = None, [], False, 0
        receiver.progress = 0
        req.state = ReqState.BOOTSTRAPPING
        self.withdrawn += 1
        self._queue(receiver, now)
        self._claims.revoked(req)

    def _expect(self, receiver: KVReceiver) -> None:
        """Allocate window pages for KV that is certain to come.

        They may have been in use more recently than the room's other pages, so the fence is taken anew.
        """
        if not receiver.expects:
            receiver.expects = True
            memory = self._scheduler.memory
            memory.pinned.expect(receiver.req, receiver.length, receiver.goes_on)
            receiver.fence = memory.pinned.fence()

    def _request(self, receiver: KVReceiver, now: float) -> None:
        req, peer, memory = receiver.req, receiver.peer, self._scheduler.memory
        run = memory.pinned.run(receiver.prefix_len, receiver.length, receiver.goes_on)
        if sum(run.counts) > MAX_PAGES:
            text = f"it needs {sum(run.counts)} KV pages, a hand-over can name {MAX_PAGES}; use a larger --page-size"
            self._fail(receiver, 400, text)
            return
        receiver.state, req.state = ReceiverState.TRANSFERRING, ReqState.TRANSFERRING
        req.phases.enter(Phase.TRANSFER, now)
        assert receiver.hold is not None
        pages = memory.pinned.pages_in(receiver.hold, run, run.begin, run.end)
        receiver.granted, receiver.pages = True, [pack_i32(numbers) for numbers in pages]
        grant = GrantPages(receiver.handover, peer.epoch, receiver.pages, peer.order, self._checksum)
        self._scheduler.outbox.to_transfer(grant)
        receiver.requested_at, receiver.deadline = now, now + self._limits.landing
        self._claims.requested(req, now)
        req.held = self.store_first.held(receiver)
        peer.send(
            TransferRequest(
                peer.epoch,
                receiver.handover,
                receiver.length,
                digest_of(req, receiver.length),
                receiver.prefix_len,
                receiver.pages,
                self._checksum,
                hashes=memory.debug.enabled,
            )
        )

    # --- the prefill answers ---

    def on_progress(self, peer: Peer, msg: Progress, now: float) -> None:
        """Extend the deadline of a hand-over if the prefill reports progress."""
        receiver = self._known(peer, msg.handover)
        if receiver is None or receiver.state is not ReceiverState.TRANSFERRING:
            return
        if receiver.advances(msg.pages, self._scheduler.memory.pool.page_size):
            receiver.deadline = now + self._limits.landing

    def on_first_token(self, peer: Peer, msg: FirstToken, now: float) -> None:
        """Send the first token to the client. It arrives when the prompt is computed, before the KV."""
        receiver = self._known(peer, msg.handover)
        if receiver is None or receiver.state is not ReceiverState.TRANSFERRING:
            return
        if receiver.begun or receiver.newcomer is not None:
            return  # it has output already
        receiver.deadline = now + self._limits.landing
        req = receiver.req
        problem = first_token_problem(msg, req, self._vocab_size)
        if problem is not None:
            self._fail(receiver, 502, problem)
            return
        # Logprobs that the client did not ask for are dropped.
        logprob = msg.logprob if req.msg.logprobs is not None else None
        scores = msg.input_logprobs if req.wants_input_logprobs else None
        receiver.begun = True
        self._claims.began(req.rid)
        req.times.first_token = now
        take_times(receiver, msg.timing, now)
        req.cached_tokens, req.input_logprobs = min(msg.cached_tokens, req.prompt_len), scores
        req.cached_beyond = msg.cached_beyond
        self._scheduler.peer_requests.take_first_token(req, msg.token, logprob, now)

    def on_done(self, peer: Peer, msg: TransferDone, now: float) -> None:
        """Have the worker check that the landed pages are what the prefill sent."""
        receiver = self._known(peer, msg.handover)
        if receiver is None:
            return
        if receiver.state is ReceiverState.DRAINING:
            self._drained(receiver)
        elif receiver.state is ReceiverState.TRANSFERRING and not receiver.begun and receiver.newcomer is None:
            receiver.state = ReceiverState.VERIFYING  # nothing can be written any more
            self._fail(receiver, 502, "the prefill instance sent the prompt's KV without a first token")
        elif receiver.state is ReceiverState.TRANSFERRING:
            receiver.state, receiver.there, receiver.checking = ReceiverState.VERIFYING, msg.timing, True
            receiver.deadline = self._now + self._limits.landing
            receiver.hashes = msg.hashes
            self._revoke(receiver, are_checked=True)  # a write during the check would go unnoticed
            check = VerifyPages(receiver.handover, receiver.pages, msg.slices, peer.order, self._checksum)
            self._scheduler.outbox.to_transfer(check)

    def on_verified(self, event: PagesVerified, now: float) -> None:
        """Take the worker's verdict on the landed pages; with KV debugging, compare their hashes as well."""
        receiver = self.rooms.get(event.handover.room)
        if receiver is None or receiver.handover != event.handover or not receiver.checking:
            return
        debug, hold = self._scheduler.memory.debug, receiver.hold
        if not debug.enabled or hold is None or not event.ok:
            self._checked(receiver, "" if event.ok else "checksum mismatch", now)
            return
        first, pages = receiver.whole_pages(self._scheduler.memory.pool.page_size)
        debug.landed(receiver.req, hold, first, pages, receiver.hashes, partial(self._checked, receiver))

    def _checked(self, receiver: KVReceiver, problem: str, now: float) -> None:
        """Start the request if its landed pages are good (``problem`` is empty), otherwise fail the room."""
        receiver.checking = False
        if receiver.state is ReceiverState.DRAINING:
            self._drained(receiver)
            return
        if problem:
            self._fail(receiver, 502, f"the KV that arrived is not what the prefill instance sent ({problem})")
            return
        req, there = receiver.req, receiver.there
        assert there is not None
        if receiver.begun and not req.is_ended:
            self._choice.learn_lag(receiver.peer.epoch, len(receiver.pages[0]) // 4, now - req.times.first_token, now)
        assert receiver.hold is not None
        receiver.hold.verified = True
        self._over(receiver)
        self.done += 1
        self.bytes_received += there.transfer_bytes
        if not req.is_ended and receiver.newcomer is not None:
            req.computed = receiver.length
            receiver.newcomer.landed(req)
        elif not req.is_ended:
            take_times(receiver, there, now)
            self._scheduler.peer_requests.start_landed(req, now)

    def on_failed(self, peer: Peer, msg: TransferFailed, now: float) -> None:
        """End a room that the prefill gave up. The prefill writes no more."""
        receiver = self._known(peer, msg.handover)
        if receiver is None or receiver.state is ReceiverState.DECLINED:
            return
        if receiver.state is ReceiverState.DRAINING:
            self._drained(receiver)
        else:
            receiver.state = ReceiverState.VERIFYING  # nothing can be written any more, so nothing needs draining
            is_leg = not receiver.begun and receiver.newcomer is None
            if msg.status == CLIENT_GONE and is_leg and not receiver.req.is_ended:
                # The abort at the prefill was meant for the whole request; the abort sent here is late or was lost.
                reason = shown(msg.reason, REASON_CHARS)
                self._scheduler.end(receiver.req, ReqState.ABORTED, FinishReason(FinishType.ABORT, message=reason))
                self._let_go(receiver, reason)
                return
            self._fail(receiver, msg.status, shown(msg.reason, REASON_CHARS))

    def on_abort_ack(self, peer: Peer, msg: AbortAck, now: float) -> None:
        """Free the memory of an aborted hand-over, now that the prefill writes no more."""
        receiver = self._known(peer, msg.handover)
        if receiver is not None and receiver.state is ReceiverState.DRAINING:
            self._drained(receiver)

    # --- the ways out ---

    def cancel(self, req: Req, reason: str) -> None:
        """End the room of a request that ended here. Its memory stays pinned until nothing can write to it any more."""
        receiver = self._of(req)
        if receiver is not None:
            self._let_go(receiver, reason)

    def on_gone(self, peer: Peer) -> None:
        """Fail the requests of a prefill that is gone, or compute their prompts here.

        Pages that it may still write are freed by ``on_down``.
        """
        for receiver in [r for r in self.rooms.values() if r.peer is peer]:
            if receiver.state in (ReceiverState.VERIFYING, ReceiverState.DECLINED):
                continue  # the KV is here, or the prompt is computed here
            self._give_up(receiver, peer.status, why(peer))
            if receiver.state in (ReceiverState.TRANSFERRING, ReceiverState.DRAINING) and not peer.down:
                self._begin_draining(receiver)
            else:
                self._drained(receiver)

    def on_down(self, peer: Peer) -> None:
        """Free the pages of a gone prefill, which can't write here any more."""
        for receiver in [r for r in self.rooms.values() if r.peer is peer and r.state is ReceiverState.DRAINING]:
            self._drained(receiver)

    def warning(self, now: float) -> str | None:
        """Return a warning about memory that a hanging peer still holds, or None."""
        stuck = [r for r in self._in(ReceiverState.DRAINING) if now - r.draining_since > STUCK_SECONDS]
        if not stuck:
            return None
        tokens = sum(r.length - r.prefix_len for r in stuck)
        peers = ", ".join(sorted({r.peer.epoch for r in stuck}))
        return (
            f"the KV memory of {len(stuck)} hand-overs ({tokens} tokens) can't be used again before instance {peers} "
            "has let go of it: it hangs; end it"
        )

    def info(self, now: float) -> list[dict[str, Any]]:
        """Return the open rooms for ``/transfers``."""
        return [receiver.info(now) for receiver in self.rooms.values()]

    def pinned(self) -> list[KVHold]:
        """Return memory that a prefill or this instance's worker may still write."""
        return [r.hold for r in self.rooms.values() if r.hold is not None]

    def _in(self, state: ReceiverState) -> list[KVReceiver]:
        return [r for r in self.rooms.values() if r.state is state]

    def _of(self, req: Req) -> KVReceiver | None:
        if req.msg.bootstrap is None:
            return next((r for r in self.rooms.values() if r.newcomer is not None and r.req is req), None)
        receiver = self.rooms.get(req.msg.bootstrap.room)
        return receiver if receiver is not None and receiver.req is req else None

    def _known(self, peer: Peer, handover: HandoverId) -> KVReceiver | None:
        receiver = self.rooms.get(handover.room)
        if receiver is None or receiver.handover != handover or receiver.peer is not peer:
            # Usually the answer to an abort of a room that had nothing to drain.
            log.debug("dropped a message of %s for room %d, which is not open", peer.epoch, handover.room)
            return None
        return receiver

    def _fail(self, receiver: KVReceiver, status: int, reason: str) -> None:
        log.info("room %d is off: %s", receiver.handover.room, reason, extra={"rid": receiver.req.rid})
        self._give_up(receiver, status, reason)
        self._let_go(receiver, reason)

    def _give_up(self, receiver: KVReceiver, status: int, reason: str) -> None:
        """Handle KV that will not come.

        After the first token the prompt is computed here. Before it the request fails, and the client may retry.
        """
        req = receiver.req
        if req.is_ended or req.route is not Route.INCOMING:
            return
        self._choice.on_cancelled(req, self._now)
        if receiver.newcomer is not None:
            receiver.newcomer.lost(req, reason)
        elif receiver.begun:
            log.info("its prompt is computed here", extra={"rid": req.rid})
            self.recomputed += 1
            self._scheduler.peer_requests.recompute(req, self._now)
        else:
            self._scheduler.fail(req, status, reason, "transfer_error")

    def _let_go(self, receiver: KVReceiver, reason: str) -> None:
        peer, state = receiver.peer, receiver.state
        if state in (ReceiverState.DRAINING, ReceiverState.DECLINED):
            return
        if peer.readable and state in (
            ReceiverState.QUEUED,
            ReceiverState.PREALLOCATED,
            ReceiverState.TRANSFERRING,
        ):
            peer.send(Abort(peer.epoch, receiver.handover, shown(reason, REASON_CHARS)))
        if state is ReceiverState.TRANSFERRING and not peer.down:
            self._begin_draining(receiver)
        else:
            self._drained(receiver)

    def _drained(self, receiver: KVReceiver) -> None:
        """Close a failed room that no peer writes to. While our worker checks its pages, keep it DRAINING."""
        if receiver.checking:
            self._begin_draining(receiver)
            return
        self.failed += 1
        self._over(receiver)

    def _begin_draining(self, receiver: KVReceiver) -> None:
        if receiver.state is not ReceiverState.DRAINING:
            receiver.state, receiver.draining_since = ReceiverState.DRAINING, self._now

    def _revoke(self, receiver: KVReceiver, *, are_checked: bool = False) -> None:
        if receiver.granted:
            receiver.granted = False
            self._scheduler.outbox.to_transfer(RevokePages(receiver.handover, are_checked))

    def _over(self, receiver: KVReceiver) -> None:
        """Close a room: revoke the prefill's grant and unpin its memory."""
        del self.rooms[receiver.handover.room]
        self._revoke(receiver)
        if receiver.hold is not None:
            self._scheduler.memory.pinned.unpin(receiver.hold)


METRICS: Metrics[ReceiverTable] = (
    counter("pdserve_kv_received_bytes_total", "KV received from other instances.", lambda r: r.bytes_received),
    counter(
        "pdserve_handovers_received_total",
        "Hand-overs received that are over.",
        lambda r: {"done": r.done, "failed": r.failed},
        "outcome",
        note="Outcomes: `done`, `failed`.",
    ),
    gauge("pdserve_handovers_received_open", "Hand-overs received that are under way.", lambda r: len(r.rooms)),
    counter(
        "pdserve_handovers_recomputed_total",
        "Hand-overs that failed after their first token, so that the prompt was computed here.",
        lambda r: r.recomputed,
    ),
)
