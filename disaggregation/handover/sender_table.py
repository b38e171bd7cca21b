"""Hand-overs on the prefill instance.

A ``KVSender`` is one hand-over, named by its bootstrap room. It opens with the client's request or with the decode's
first message, whichever comes first::

    request + TransferRequest → enqueued → take_computed_pages* pushes pages → on_prompt_computed → FirstToken
                                                              └─ SendEnded, and the first token → TransferDone

An idle instance computes a short prompt before the decode asks, and pushes the pages when it is asked. A prompt that is
finished before that keeps its memory until another request waits for memory. Otherwise two instances could wait for
each other's memory.

On every other path the room *drains*. The worker is told to cancel. Its ``SendEnded`` confirms that nothing more is
read here or written there. Only then are the pages freed and the decode notified (``TransferFailed``, ``AbortAck``).
A request that ends early leaves a tombstone for a while, so that a late message of the other side is answered at once.

The client's request knows only the room, so the two requests are matched by room. From the decode's first message on,
the room belongs to one attempt of that decode (``HandoverId``). Messages of other attempts do not affect it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ...mem_cache.base_prefix_cache import KVHold
from ...messages.base import HandoverId
from ...messages.handover import (
    Abort,
    AbortAck,
    Declined,
    FirstToken,
    ForecastRequest,
    RoomQueued,
    TransferRequest,
    Withdraw,
    Withdrawn,
)
from ...messages.outputs import FinishReason, FinishType, Phase
from ...runtime.metrics import Metrics, counter, gauge
from ...scheduler.req import Req, ReqState
from ...scheduler.scheduler import Scheduler
from ..transfer.outgoing_pages import MIN_AHEAD_BYTES
from .control.frames import LONG_FRAME_BYTES
from .failure import CLIENT_GONE, Failure
from .kv_sender import DecodeSide, KVSender, PromptTransfer, SenderState, mismatch
from .limits import HandoverLimits
from .peer import Peer
from .peer_dispatcher import Handlers
from .placement_policy import PlacementPolicy
from .prompt_pushes import PromptPushes
from .sender_rooms import SenderRooms

log = logging.getLogger(__name__)

DECLINED = Failure(503, "declined")
"""A hand-over that the decode does not need, because it computes the prompt itself."""


class SenderTable:
    """Owner of all hand-overs from this instance, by bootstrap room."""

    def __init__(
        self,
        scheduler: Scheduler,
        epoch: str,
        page_size: int,
        limits: HandoverLimits,
        policy: PlacementPolicy,
    ) -> None:
        self._scheduler = scheduler
        self._epoch = epoch
        self._policy = policy
        self._page_size = page_size
        self._limits = limits
        self._rooms = SenderRooms(scheduler, limits)
        self.pushes = PromptPushes(scheduler, self._rooms, page_size, limits)
        self.estimates = self._rooms.estimates

    @property
    def rooms(self) -> Mapping[int, KVSender]:
        """The open rooms, by bootstrap room."""
        return self._rooms.by_number

    @property
    def failed(self) -> int:
        """Number of hand-overs that failed."""
        return self._rooms.failed

    # --- the two requests arrive ---

    def add(self, req: Req, room: int, now: float) -> None:
        """Add a client's request to its room, which is opened if the decode has not done so.

        If both requests are here, the prompt is queued. If the decode has declined or given the room up, the request
        ends at once, with the status that both legs have. It fails if the room has a request already.
        """
        self._rooms.set_time(now)
        self._rooms.left.take(room)  # left by an earlier request
        if self._rooms.declined.take(room) is not None:
            self._end_declined(req)
            self._rooms.left.add(room, DECLINED, now)  # the tombstone may stem from an earlier request
            return
        over = self._rooms.given_up.take(room)
        if over is not None:
            self._end_given_up(req, over)
            self._rooms.left.add(room, over, now)  # if both sides reuse a room too soon, both are notified
            return
        sender = self.rooms.get(room)
        if sender is None:
            sender = self._rooms.open(room, now)
        elif sender.req is not None:
            text = f"bootstrap_room {room} is in use; draw a fresh one for every request"
            self._scheduler.fail(req, 400, text, "invalid_request_error")
            return
        sender.req = req
        self._rooms.unclaimed.drop(sender.peer, room)
        self._limit_asking(sender, now)
        self._try_start(sender, now)
        self.estimates.tell(sender, now)

    def handlers(self) -> Handlers:
        """Return the handlers of the messages that the receivers of KV send."""
        return {
            RoomQueued: self.on_queued,
            ForecastRequest: self.on_forecast_request,
            Declined: self.on_declined,
            TransferRequest: self.on_request,
            Withdraw: self.on_withdraw,
            Abort: self.on_abort,
        }

    def on_queued(self, peer: Peer, msg: RoomQueued, now: float) -> None:
        """Open the room, or note its decode, which will ask for the KV when it has memory.

        From then on it has ``HandoverLimits.asking`` seconds, and a repeated message about the same attempt adds none.
        """
        self._opened(peer, msg.handover, 0, now)

    def on_forecast_request(self, peer: Peer, msg: ForecastRequest, now: float) -> None:
        """Send a forecast of the first token's time to a decode, now or as soon as the client's request is here."""
        sender = self._opened(peer, msg.handover, 0, now)
        if sender is not None and sender.asks is None and sender.transfer_request is None:
            sender.asks = True
            self.estimates.tell(sender, now)

    def on_declined(self, peer: Peer, msg: Declined, now: float) -> None:
        """End a room, and its request, because the decode computes the prompt itself. This is no failure.

        If the client's request has not come, it ends as soon as it comes.
        """
        handover = msg.handover
        self._rooms.set_time(now)
        sender = self.rooms.get(handover.room)
        if self._rooms.is_over(handover) or (sender is not None and sender.is_of_another(handover)):
            return
        if sender is not None and sender.transfer_request is not None:
            self._rooms.drain(sender, 409, "the decode instance declined what it had asked for")
            return
        req = sender.req if sender is not None else None
        self._rooms.note_over(handover)
        if sender is not None:
            self._rooms.unclaimed.drop(sender.peer, sender.room)
            self._rooms.close(sender)
        else:
            self._rooms.given_up.take(handover.room)  # left by an earlier attempt
        if req is None and self._rooms.left.take(handover.room) is None:
            self._rooms.declined.add(handover.room, DECLINED, now)
        elif req is not None and not req.is_ended:
            self._end_declined(req)

    def _end_declined(self, req: Req) -> None:
        text = "the decode instance computes the prompt itself"
        req.pending_output, req.pending_logprobs = [], []  # the client gets the decode's first token instead
        self._scheduler.end(req, ReqState.MOVED, FinishReason(FinishType.DECLINED, message=text))

    def _end_given_up(self, req: Req, over: Failure) -> None:
        """End a request that comes after its hand-over failed, as it would have ended if it had come before.

        If the decode aborted it, it is aborted here. An error would count as a failure of this instance at a router.
        """
        text = f"the decode instance gave the hand-over up: {over.reason}"
        if over.status == CLIENT_GONE:
            self._scheduler.end(req, ReqState.ABORTED, FinishReason(FinishType.ABORT, message=text))
        else:
            self._scheduler.fail(req, over.status, text, "transfer_error")

    def _opened(self, peer: Peer, handover: HandoverId, nbytes: int, now: float) -> KVSender | None:
        """Return the room of ``handover``, assigned to ``peer``, and open it if it is missing.

        ``nbytes``: size of the page numbers in the peer's message. Return None if the hand-over has ended, or if the
        room is another decode's or attempt's, has failed, or is one too many. In the last three cases the peer is told.
        """
        room = handover.room
        self._rooms.set_time(now)
        if self._rooms.is_over(handover):
            return None  # the peer knows that it has ended, and may have reused the pages
        sender = self.rooms.get(room)
        if sender is not None and sender.withdrawn and sender.peer is peer and handover.epoch == peer.epoch:
            if sender.decode is not None and sender.decode.handover != handover:
                self._rooms.note_over(sender.decode.handover)
            sender.decode, sender.withdrawn = DecodeSide(peer, handover), False
            self._limit_asking(sender, now)
        if sender is not None and sender.is_of_another(handover):
            whose = "in use" if sender.peer is peer else "another decode's"
            self._rooms.deny(peer, handover, 409, f"bootstrap_room {room} is {whose}")
            return None
        if sender is None:
            self._rooms.given_up.take(room)  # left by an earlier attempt
            self._rooms.declined.take(room)
            over = self._rooms.left.take(room)
            if over is not None:
                self._rooms.deny(peer, handover, over.status, f"the prefill instance gave up: {over.reason}")
                return None
        if sender is None or sender.req is None:
            too_many = self._rooms.unclaimed.admit(peer, room, nbytes)
            if too_many is not None:
                self._rooms.deny(peer, handover, 503, too_many)
                return None
        if sender is None:
            sender = self._rooms.open(room, now)
        is_first = sender.decode is None
        sender.assign(peer, handover)
        if is_first:
            self._limit_asking(sender, now)
        return sender

    def _limit_asking(self, sender: KVSender, now: float) -> None:
        """Limit the time until the decode asks for the KV. Do nothing if it or the client's request is missing."""
        if sender.req is not None and sender.decode is not None:
            sender.deadline = now + self._limits.asking

    def on_request(self, peer: Peer, msg: TransferRequest, now: float) -> None:
        """Note that the decode has memory and asks for the room's KV. Its transfer starts as soon as the client's
        request is here.

        If the two do not fit, or the decode asks twice, the hand-over fails.
        """
        known = self.rooms.get(msg.handover.room)
        if known is not None and known.handover == msg.handover and known.transfer_request is not None:
            self._rooms.drain(known, 409, f"bootstrap_room {known.room} was asked for twice")
            return
        sender = self._opened(peer, msg.handover, sum(map(len, msg.dst_pages)), now)
        if sender is None:
            return
        sender.transfer_request = msg
        self.estimates.is_decided(sender)
        self._try_start(sender, now)

    def on_withdraw(self, peer: Peer, msg: Withdraw, now: float) -> None:
        """Answer a decode that wants the memory back which it has offered for a room's KV.

        It gets the memory back unless the prompt has begun or is about to begin. A prompt is about to begin if this
        instance is withdrawing other memory for it. Such withdrawals can form a circle of instances. In every circle
        one instance has a larger epoch than the peer that asks it. That instance gives the memory back. See
        ``scheduler/claims.py``.
        """
        self._rooms.set_time(now)
        sender = self.rooms.get(msg.handover.room)
        if (
            sender is None
            or sender.peer is not peer
            or sender.handover != msg.handover
            or sender.transfer_request is None
        ):
            return  # it crossed the end of the room, or an abort; the decode learns of these by other messages
        req = sender.req
        begun = sender.state not in (SenderState.BOOTSTRAPPING, SenderState.QUEUED)
        begun = begun or (req is not None and (req.hold is not None or req.is_ended))
        begun = begun or (req is not None and self._epoch < peer.epoch and self._scheduler.planner.claims.asks_for(req))
        if not begun:
            sender.state, sender.withdrawn = SenderState.BOOTSTRAPPING, True
            sender.transfer_request, sender.transfer = None, None
            if req is not None:
                self._scheduler.peer_requests.take_back(req)
                self._limit_asking(sender, now)
            else:
                self._rooms.unclaimed.drop(peer, sender.room)
                self._rooms.unclaimed.admit(peer, sender.room, 0)
        peer.send(Withdrawn(peer.epoch, msg.handover, begun=begun))

    def _try_start(self, sender: KVSender, now: float) -> None:
        req, request, decode = sender.req, sender.transfer_request, sender.decode
        if req is None:
            return
        if request is None or decode is None:
            may_be_wanted = self._leaves_whole(req) and not self._policy.would_decline(req)
            if may_be_wanted and self._scheduler.peer_requests.may_compute_ahead(req):
                sender.state = SenderState.AHEAD
                self._scheduler.enqueue(req, now)
            return
        run = self._scheduler.memory.pinned.run(request.decode_prefix_len, req.prompt_len, goes_on=req.prompt_len - 1)
        problem = mismatch(req, request, run, self._page_size)
        if problem is not None:
            self._rooms.drain(sender, 409, problem)
            return
        ahead = sender.state is SenderState.AHEAD
        sender.state, sender.deadline = SenderState.QUEUED, now + self._limits.queue
        sender.transfer = PromptTransfer(req, decode, request, run, next_page=run.begin, reported_at=now)
        if not ahead:
            self._scheduler.enqueue(req, now)
            req.phases.mark(now)
            return
        req.times.ready = now
        req.phases.mark(now)
        push = self.pushes.take_computed_pages(req) if req.hold is not None else None
        if push is not None:
            # Queued in the order of the steps, so that the steps that compute these pages run first.
            self._scheduler.outbox.to_worker(push)
        if sender.first is not None:
            req.phases.enter(Phase.TRANSFER, now)
            self.pushes.on_prompt_computed(req, sender.first.token, sender.first.logprob)

    def _leaves_whole(self, req: Req) -> bool:
        """Return whether a prompt's KV is too small to be pushed layer by layer, so that computing it ahead loses
        nothing.

        Pushing by layers requires the decode's request before the step begins. For a long prompt that is worth more
        than an early start.
        """
        run = self._scheduler.memory.pinned.run(0, req.prompt_len, goes_on=req.prompt_len - 1)
        groups = self._scheduler.worker.layout.groups
        nbytes = sum(pages * group.page_bytes for pages, group in zip(run.counts, groups, strict=True))
        return nbytes <= MIN_AHEAD_BYTES

    # --- the ways out ---

    def cancel(self, req: Req, reason: str) -> None:
        """End the hand-over of a request that ended here, aborted or failed, and tell the decode. Do nothing without
        one.
        """
        sender = self._rooms.of(req)
        if sender is not None:
            # Its client may hear of it from either instance: both must say the same.
            status = CLIENT_GONE if req.state is ReqState.ABORTED else req.failed_with or 500
            self._rooms.drain(sender, status, reason)

    def on_too_long(self, peer: Peer, msg: FirstToken) -> None:
        """Fail the hand-over of a ``FirstToken`` that was not sent: its logprobs exceed the peer's frame limit."""
        sender = self.rooms.get(msg.handover.room)
        if sender is not None and sender.handover == msg.handover:
            text = f"the prompt's logprobs are longer than {LONG_FRAME_BYTES >> 20} MiB; ask for fewer top_logprobs"
            self._rooms.drain(sender, 400, text)

    def on_abort(self, peer: Peer, msg: Abort, now: float) -> None:
        """End a room, and its request, because the decode gives it up.

        That is acknowledged when nothing is written there any more. If the client's request has not come, it fails as
        soon as it comes.
        """
        handover = msg.handover
        self._rooms.set_time(now)
        sender = self.rooms.get(handover.room)
        if self._rooms.is_over(handover) or (sender is not None and sender.is_of_another(handover)):
            peer.send(AbortAck(peer.epoch, handover))
            return
        if sender is None:
            self._rooms.given_up.add(handover.room, Failure(CLIENT_GONE, msg.reason), now)
            peer.send(AbortAck(peer.epoch, handover))
            return
        sender.assign(peer, handover)
        sender.abort_asked = True
        if sender.req is not None and not sender.req.is_ended:
            self._scheduler.end(sender.req, ReqState.ABORTED, FinishReason(FinishType.ABORT, message=msg.reason))
        if sender.state is not SenderState.DRAINING:
            self._rooms.drain(sender, CLIENT_GONE, msg.reason)

    def on_gone(self, peer: Peer) -> None:
        """End the rooms, and fail the requests, of a decode that died or fell silent."""
        for sender in [s for s in self.rooms.values() if s.peer is peer]:
            self._rooms.drain(sender, 502, f"the decode instance is gone: {peer.reason}")

    def tick(self, now: float) -> None:
        """Send due forecasts, end rooms past their deadline, and free memory of prompts computed ahead if requests need
        it.
        """
        self._rooms.set_time(now)
        self._free_unclaimed_prompts(now)
        for sender in list(self.rooms.values()):
            self.estimates.tell(sender, now)
            if now < sender.deadline or sender.state is SenderState.DRAINING:
                continue
            if sender.state is SenderState.PUSHING:
                limit = self._limits.transfer if sender.computed else self._limits.piece
                self._rooms.drain(sender, 504, f"the hand-over made no progress for {limit:.0f} s")
            elif sender.state is SenderState.QUEUED:
                text = f"the prompt's turn to be computed did not come within {self._limits.queue:.0f} s"
                self._rooms.drain(sender, 504, text)
            elif sender.req is None:
                text = f"no request for this room reached the prefill instance within {self._limits.bootstrap:.0f} s"
                self._rooms.drain(sender, 504, text)
            elif sender.decode is None:
                text = f"no decode instance asked for this room within {self._limits.bootstrap:.0f} s"
                self._rooms.drain(sender, 504, text)
            else:
                text = f"the decode instance queued this room and did not ask for it within {self._limits.asking:.0f} s"
                self._rooms.drain(sender, 504, text)
        self._rooms.expire(now)

    def _free_unclaimed_prompts(self, now: float) -> None:
        """Free the memory of finished prompts that no decode has asked for, if other requests lack memory.

        Their rooms stay open. Each prompt is computed again later; what is still cached is reused. A request that waits
        for its turn to be computed does not lack memory (``MemoryShortage.lacks_memory``).
        """
        done = [(s, s.first) for s in self.rooms.values() if s.state is SenderState.AHEAD and s.first is not None]
        for sender, first in done if done and self._scheduler.planner.shortage.lacks_memory(now) else ():
            sender.state, sender.first = SenderState.BOOTSTRAPPING, None
            self._scheduler.peer_requests.start_over(first.req)

    def pinned(self) -> list[KVHold]:
        """Return the holds of memory that the worker may still read for transfers."""
        return self._rooms.pinned()

    def info(self, now: float) -> list[dict[str, Any]]:
        """Return the open rooms for ``/transfers``, JSON-ready."""
        return [sender.info(now) for sender in self.rooms.values()]


METRICS: Metrics[SenderTable] = (
    counter("pdserve_kv_sent_bytes_total", "KV sent to other instances.", lambda s: s.pushes.bytes_sent),
    counter(
        "pdserve_kv_push_seconds_total", "Time spent sending KV to other instances.", lambda s: s.pushes.push_seconds
    ),
    counter(
        "pdserve_handovers_sent_total",
        "Hand-overs sent that are over.",
        lambda s: {"done": s.pushes.done, "failed": s.failed},
        "outcome",
        note="Outcomes: `done`, `failed`.",
    ),
    gauge("pdserve_handovers_sent_open", "Hand-overs sent that are under way.", lambda s: len(s.rooms)),
)
