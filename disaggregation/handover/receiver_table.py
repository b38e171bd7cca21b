"""Hand-overs on the decode instance.

A ``KVReceiver`` is one hand-over, named by its bootstrap room::

    LINKING → QUEUED → PREALLOCATED → TRANSFERRING → VERIFYING → (the request runs)
       └────────┴───────────┤             └──────────────┴──▶ DRAINING → (memory freed)
                            └──▶ DECLINED (the prompt is computed here)

- LINKING waits until the prefill instance is connected.
- QUEUED waits for memory (``receiver_queue.py``). ``scheduler/claims.py`` decides which room is next. It also decides
  which room goes back to QUEUED because its prefill does not begin.
- PREALLOCATED waits for up to three things:

  - The steps that were under way when its pages were allocated. They may still write to the pages (see
    ``scheduler/kv_pool.py``), and a remote writer must come after them.
  - The prefill's forecast, if the placement depends on it (``placement_stage.py``). The forecast is not used before
    this state, because only with memory can either instance begin.
  - The pages of the prompt in this instance's own store (``store_first.py``).

- DECLINED is a room with a prompt that is computed here. It stays open until the prefill is notified.
- DRAINING is a room that ended while the prefill may still write (``receiver_rooms.py``). Its pages are freed when the
  prefill confirms that it will not write, or when its link is down for good. A worker that checks the pages may rewrite
  them in its own order; until it answers, they are not freed.

KV with a wrong checksum, room or epoch never reaches the model.

The first token arrives before the KV, in TRANSFERRING, and goes to the client at once (``incoming_prompts.py``). So a
request may end before its KV has arrived; the KV then stays in the cache for other requests. If a room fails after its
first token, the prompt is computed here.

A migrating request has a room, too. It has output already, so no first token comes. What becomes of its KV is up to its
``KVConsumer``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ...mem_cache.base_prefix_cache import KVHold
from ...messages.base import REASON_CHARS, HandoverId, pack_i32
from ...messages.decode import shown
from ...messages.handover import (
    AbortAck,
    FirstToken,
    Forecast,
    Progress,
    TransferDone,
    TransferFailed,
    TransferRequest,
    Withdrawn,
)
from ...messages.outputs import FinishReason, FinishType, Phase
from ...messages.requests import Bootstrap
from ...messages.worker import MAX_PAGES, GrantPages, PagesVerified, VerifyPages
from ...runtime.metrics import Metrics, counter, gauge
from ...scheduler.req import Req, ReqState, Route
from ...scheduler.scheduler import Scheduler
from .failure import CLIENT_GONE
from .incoming_prompts import IncomingPrompts
from .kv_receiver import (
    KVConsumer,
    KVReceiver,
    LandedCheck,
    ReceiverMemory,
    ReceiverState,
    StoreStage,
    too_late,
    why,
)
from .kv_sender import digest_of
from .limits import HandoverLimits
from .peer import Peer
from .peer_dispatcher import Handlers
from .placement_policy import PlacementPolicy
from .placement_stage import PlacementStage
from .receiver_queue import ReceiverQueue
from .receiver_rooms import ReceiverRooms

log = logging.getLogger(__name__)


class ReceiverTable:
    """Owner of all hand-overs to this instance, by bootstrap room."""

    def __init__(
        self,
        scheduler: Scheduler,
        epoch: str,
        limits: HandoverLimits,
        peer_at: Callable[[str, int, float], Peer],
        policy: PlacementPolicy,
    ) -> None:
        self._checksum = not scheduler.options.disable_handover_checksum
        self._scheduler = scheduler
        self._limits = limits
        self._peer_at = peer_at
        self._policy = policy
        self._rooms = ReceiverRooms(scheduler, epoch)
        self._prompts = IncomingPrompts(scheduler, policy)
        self.placement = PlacementStage(scheduler, self._rooms, limits, peer_at, policy)
        self._queue = ReceiverQueue(scheduler, self._rooms, self.placement.store_first, limits)
        self._now = 0.0
        self.done = 0
        self.bytes_received = 0

    @property
    def rooms(self) -> Mapping[int, KVReceiver]:
        """The open rooms, by bootstrap room."""
        return self._rooms.by_number

    @property
    def failed(self) -> int:
        """Number of hand-overs that failed."""
        return self._rooms.failed

    @property
    def withdrawn(self) -> int:
        """Number of times a room gave its memory back because its prefill had not begun."""
        return self._queue.withdrawn

    @property
    def recomputed(self) -> int:
        """Number of prompts that were computed here because their hand-over failed after the first token."""
        return self._prompts.recomputed

    def add(self, req: Req, where: Bootstrap, now: float) -> None:
        """Open a room for a client's request, with a prompt that the prefill instance at ``where`` computes.

        A short prompt is computed here at once. If the room is in use, fail the request with 400.
        """
        if where.room in self.rooms:
            text = f"bootstrap_room {where.room} is in use; draw a fresh one for every request"
            self._scheduler.fail(req, 400, text, "invalid_request_error")
            return
        receiver = KVReceiver(
            self._rooms.draw_id(where.room),
            req,
            self._peer_at(where.host, where.port, now),
            self._prompts,
            since=now,
            deadline=now + self._limits.bootstrap,
            length=req.prompt_len,
            goes_on=req.prompt_len - 1,  # another answer to the same prompt begins in the last token's page
            awaits_first_token=True,
            decided=not self._policy.asks,
            store=StoreStage.NEW,
        )
        self._rooms.open(receiver)
        if self._policy.is_short(req):
            self.placement.compute_here(receiver, now)

    def add_migrating(
        self, req: Req, peer: Peer, handover: HandoverId, length: int, consumer: KVConsumer, now: float
    ) -> None:
        """Open a room for a request, or a finished request's KV, that ``peer`` offers, with its first ``length``
        tokens.

        ``consumer`` is told when the KV has arrived or will not come.
        """
        receiver = KVReceiver(
            handover,
            req,
            peer,
            consumer,
            since=now,
            deadline=now + self._limits.bootstrap,
            length=length,
            goes_on=length,
            awaits_first_token=False,
            decided=True,
            store=StoreStage.OVER,
            is_optional=True,
        )
        self._rooms.open(receiver)

    def advance(self, now: float) -> None:
        """Advance every room that can advance, grant and revoke memory, and fail rooms past their deadline."""
        self._now = now
        for receiver in list(self.rooms.values()):
            if receiver.state is ReceiverState.LINKING:
                self._when_linked(receiver, now)
            elif receiver.state is ReceiverState.DECLINED:
                self.placement.tell_declined(receiver, now)
            if receiver.state not in (ReceiverState.DRAINING, ReceiverState.DECLINED) and now > receiver.deadline:
                self._fail(receiver, 504, too_late(receiver, self._limits))
        self._queue.take_memory(now)
        self._queue.ask_back(now)
        for receiver, memory in self._rooms.preallocated():
            self.placement.decide(receiver, now)
            if receiver.state is ReceiverState.PREALLOCATED and receiver.knows_what_to_ask:
                self._queue.expect(receiver, memory)
                if self._scheduler.memory.pinned.is_past(memory.fence, self._scheduler.completed_step):
                    self._request(receiver, memory, now)

    def handlers(self) -> Handlers:
        """Return the handlers of the messages that the senders of KV send."""
        return {
            Forecast: self.placement.on_forecast,
            Progress: self.on_progress,
            FirstToken: self.on_first_token,
            TransferDone: self.on_done,
            TransferFailed: self.on_failed,
            Withdrawn: self._queue.on_withdrawn,
            AbortAck: self.on_abort_ack,
        }

    def _when_linked(self, receiver: KVReceiver, now: float) -> None:
        if receiver.peer.same_as is not None:
            receiver.peer = receiver.peer.same_as
        peer = receiver.peer
        if peer.gone:
            self._fail(receiver, peer.status, why(peer))
        elif peer.readable:
            self._queue.add(receiver, now)

    def _request(self, receiver: KVReceiver, memory: ReceiverMemory, now: float) -> None:
        req, peer, pinned = receiver.req, receiver.peer, self._scheduler.memory.pinned
        run = pinned.run(receiver.prefix_len, receiver.length, receiver.goes_on)
        if sum(run.counts) > MAX_PAGES:
            text = f"it needs {sum(run.counts)} KV pages, a hand-over can name {MAX_PAGES}; use a larger --page-size"
            self._fail(receiver, 400, text)
            return
        receiver.state, req.state = ReceiverState.TRANSFERRING, ReqState.TRANSFERRING
        req.phases.enter(Phase.TRANSFER, now)
        pages = pinned.pages_in(memory.hold, run, run.begin, run.end)
        receiver.granted, receiver.pages = True, [pack_i32(numbers) for numbers in pages]
        grant = GrantPages(receiver.handover, peer.epoch, receiver.pages, peer.order, self._checksum)
        self._scheduler.outbox.to_transfer(grant)
        receiver.requested_at, receiver.deadline = now, now + self._limits.landing
        self._scheduler.planner.claims.requested(req, now)
        req.held = self.placement.store_first.held(receiver)
        peer.send(
            TransferRequest(
                peer.epoch,
                receiver.handover,
                receiver.length,
                digest_of(req, receiver.length),
                receiver.prefix_len,
                receiver.pages,
                self._checksum,
                hashes=self._scheduler.memory.debug.enabled,
            )
        )

    # --- the prefill answers ---

    def on_progress(self, peer: Peer, msg: Progress, now: float) -> None:
        """Extend the deadline of a hand-over if the prefill reports progress."""
        receiver = self._rooms.known(peer, msg.handover)
        if receiver is None or receiver.state is not ReceiverState.TRANSFERRING:
            return
        if receiver.advances(msg.pages, self._scheduler.memory.pool.page_size):
            receiver.deadline = now + self._limits.landing

    def on_first_token(self, peer: Peer, msg: FirstToken, now: float) -> None:
        """Send the first token, which arrives before the KV, to the client. If it is invalid, fail the request."""
        receiver = self._rooms.known(peer, msg.handover)
        if receiver is None or receiver.state is not ReceiverState.TRANSFERRING:
            return
        if not receiver.awaits_first_token:
            return
        receiver.deadline = now + self._limits.landing
        problem = self._prompts.take_first_token(receiver, msg, now)
        if problem is not None:
            self._fail(receiver, 502, problem)

    def on_done(self, peer: Peer, msg: TransferDone, now: float) -> None:
        """Have the worker check that the arrived pages are what the prefill sent; ``on_verified`` gets the result.

        The prefill writes no more, so the memory of a room that has ended is freed.
        """
        receiver = self._rooms.known(peer, msg.handover)
        if receiver is None:
            return
        if receiver.state is ReceiverState.DRAINING:
            self._rooms.drained(receiver, self._now)
        elif receiver.state is ReceiverState.TRANSFERRING and receiver.awaits_first_token:
            receiver.state = ReceiverState.VERIFYING  # nothing can be written any more
            self._fail(receiver, 502, "the prefill instance sent the prompt's KV without a first token")
        elif receiver.state is ReceiverState.TRANSFERRING and receiver.memory is not None:
            receiver.state = ReceiverState.VERIFYING
            receiver.check = LandedCheck(receiver.memory.hold, msg.timing, msg.hashes)
            receiver.deadline = self._now + self._limits.landing
            self._rooms.revoke(receiver, are_checked=True)  # a write during the check would go unnoticed
            check = VerifyPages(receiver.handover, receiver.pages, msg.slices, peer.order, self._checksum)
            self._scheduler.outbox.to_transfer(check)

    def on_verified(self, event: PagesVerified, now: float) -> None:
        """Handle the worker's result of checking arrived pages: the request starts, or its hand-over fails.

        With ``--kv-debug`` their hashes are compared first. The hand-over also fails if its pages could not be granted.
        """
        receiver = self.rooms.get(event.handover.room)
        if receiver is None or receiver.handover != event.handover:
            return
        if receiver.check is None:
            # The prefill can't write there, and would be waited for until the link or the hand-over times out.
            receiver.granted = False
            self._fail(receiver, 500, f"this instance can't receive the KV: {event.error}")
            return
        debug, check = self._scheduler.memory.debug, receiver.check
        if not debug.enabled or not event.ok:
            self._checked(receiver, check, "" if event.ok else event.error or "checksum mismatch", now)
            return
        first, pages = receiver.whole_pages(self._scheduler.memory.pool.page_size)
        done = partial(self._checked, receiver, check)
        debug.landed(receiver.req, check.hold, first, pages, check.hashes, done)

    def _checked(self, receiver: KVReceiver, check: LandedCheck, problem: str, now: float) -> None:
        """Start the request if its arrived pages are good (``problem`` is empty), otherwise fail the room.

        A room that has ended meanwhile is closed.
        """
        receiver.check = None
        if receiver.state is ReceiverState.DRAINING:
            self._rooms.drained(receiver, self._now)
            return
        if problem:
            self._fail(receiver, 502, f"the KV that arrived is not what the prefill instance sent ({problem})")
            return
        check.hold.verified = True
        self._rooms.close(receiver)
        self.done += 1
        self.bytes_received += check.there.transfer_bytes
        if not receiver.req.is_ended:
            receiver.consumer.landed(receiver, check.there, now)

    def on_failed(self, peer: Peer, msg: TransferFailed, now: float) -> None:
        """End a room that the prefill has given up, and free its memory: the prefill writes no more.

        The request fails, or its prompt is computed here. It is aborted if its client has left.
        """
        receiver = self._rooms.known(peer, msg.handover)
        if receiver is None or receiver.state is ReceiverState.DECLINED:
            return
        if receiver.state is ReceiverState.DRAINING:
            self._rooms.drained(receiver, self._now)
        else:
            receiver.state = ReceiverState.VERIFYING  # nothing can be written any more, so nothing needs draining
            if msg.status == CLIENT_GONE and receiver.awaits_first_token and not receiver.req.is_ended:
                # The abort at the prefill was meant for the whole request; the abort sent here is late or was lost.
                reason = shown(msg.reason, REASON_CHARS)
                self._scheduler.end(receiver.req, ReqState.ABORTED, FinishReason(FinishType.ABORT, message=reason))
                self._rooms.let_go(receiver, reason, self._now)
                return
            self._fail(receiver, msg.status, shown(msg.reason, REASON_CHARS))

    def on_abort_ack(self, peer: Peer, msg: AbortAck, now: float) -> None:
        """Free the memory of an aborted hand-over, now that the prefill writes no more."""
        receiver = self._rooms.known(peer, msg.handover)
        if receiver is not None and receiver.state is ReceiverState.DRAINING:
            self._rooms.drained(receiver, self._now)

    # --- the ways out ---

    def cancel(self, req: Req, reason: str) -> None:
        """End the room of a request that ended here. Its memory stays pinned until nothing can write to it any more."""
        receiver = self._rooms.of(req)
        if receiver is not None:
            self._rooms.let_go(receiver, reason, self._now)

    def on_gone(self, peer: Peer) -> None:
        """Fail the requests of a prefill that is gone, or compute their prompts here.

        Pages that it may still write stay pinned until ``on_down``.
        """
        for receiver in self._rooms.of_peer(peer):
            if receiver.state in (ReceiverState.VERIFYING, ReceiverState.DECLINED):
                continue  # the KV is here, or the prompt is computed here
            self._give_up(receiver, peer.status, why(peer))
            if receiver.state in (ReceiverState.TRANSFERRING, ReceiverState.DRAINING) and not peer.down:
                self._rooms.begin_draining(receiver, self._now)
            else:
                self._rooms.drained(receiver, self._now)

    def on_down(self, peer: Peer) -> None:
        """Free the memory of rooms that waited for the link of a gone prefill to end: it can't write here any more."""
        for receiver in self._rooms.of_peer(peer):
            if receiver.state is ReceiverState.DRAINING:
                self._rooms.drained(receiver, self._now)

    def warning(self, now: float) -> str | None:
        """Return a warning about memory of ended rooms that hanging peers have kept for long, or None."""
        return self._rooms.warning(now)

    def info(self, now: float) -> list[dict[str, Any]]:
        """Return the open rooms for ``/transfers``, JSON-ready."""
        return [receiver.info(now) for receiver in self.rooms.values()]

    def pinned(self) -> list[KVHold]:
        """Return the holds of all rooms with memory: a prefill or this instance's worker may still write it."""
        return self._rooms.pinned()

    def _fail(self, receiver: KVReceiver, status: int, reason: str) -> None:
        log.info("room %d is off: %s", receiver.handover.room, reason, extra={"rid": receiver.req.rid})
        self._give_up(receiver, status, reason)
        self._rooms.let_go(receiver, reason, self._now)

    def _give_up(self, receiver: KVReceiver, status: int, reason: str) -> None:
        """Let the room's consumer fail the request or compute its prompt here, since its KV will not come.

        Do nothing if the request has ended or is computed here already.
        """
        req = receiver.req
        if req.is_ended or req.route is not Route.INCOMING:
            return
        self._policy.on_cancelled(req, self._now)
        receiver.consumer.lost(receiver, status, reason, self._now)


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
