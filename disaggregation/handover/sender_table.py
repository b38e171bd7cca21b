"""Hand-overs on the prefill instance.

A ``KVSender`` is one hand-over, named by its bootstrap room. It opens with the client's request or with the decode's
first message, whichever comes first::

    request + TransferRequest → enqueued → chunk_planned* pushes pages → first_token → FirstToken
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
from typing import Any

from ...mem_cache.base_prefix_cache import KVHold
from ...mem_cache.page_run import PageRun
from ...messages.base import REASON_CHARS, HandoverId, pack_i32, unpack_i32
from ...messages.decode import shown
from ...messages.handover import (
    Abort,
    AbortAck,
    Declined,
    FirstToken,
    ForecastRequest,
    Progress,
    RoomQueued,
    TransferDone,
    TransferFailed,
    TransferRequest,
    Withdraw,
    Withdrawn,
)
from ...messages.outputs import FinishReason, FinishType, Phase, TokenLogprob
from ...messages.worker import CancelSend, SendEnded, SendPages, SendProgress
from ...runtime.metrics import Metrics, counter, gauge
from ...scheduler.req import Req, ReqState
from ...scheduler.scheduler import Scheduler
from ..transfer.outgoing_pages import MIN_AHEAD_BYTES, PROGRESS_SECONDS
from .control.frames import LONG_FRAME_BYTES
from .kv_sender import KVSender, SenderState, delivered_pages, digest_of, timing_for_decode
from .limits import HandoverLimits
from .peer import Peer
from .peer_router import Handlers
from .placement_policy import PlacementPolicy
from .prefill_estimates import PrefillEstimates
from .unclaimed_rooms import Tombstones, UnclaimedRooms

log = logging.getLogger(__name__)

MAX_OVER = 1 << 14
"""Maximum number of ended hand-overs that are remembered."""


class SenderTable:
    """Owner of all hand-overs from this instance, by bootstrap room."""

    def __init__(
        self,
        scheduler: Scheduler,
        epoch: str,
        page_size: int,
        limits: HandoverLimits,
        choice: PlacementPolicy,
    ) -> None:
        self._scheduler = scheduler
        self._epoch = epoch
        self._choice = choice
        self._page_size = page_size
        self._limits = limits
        self.rooms: dict[int, KVSender] = {}
        self._unclaimed = UnclaimedRooms()
        self._given_up = Tombstones()
        """Rooms that a decode gave up before the client's request came."""
        self._left = Tombstones()
        """Rooms with a request that ended before the decode's message came."""
        self._declined = Tombstones()
        """Rooms that a decode declined, before the client's request came, because it computes the prompt itself."""
        self.estimates = PrefillEstimates(scheduler.estimator, scheduler.tiers)
        self._over: dict[HandoverId, None] = {}
        """Latest hand-overs that ended or were refused here, oldest first. Late messages about them open no room."""
        self._now = 0.0
        self.done = 0
        self.failed = 0
        self.bytes_sent = 0
        self.push_seconds = 0.0

    # --- the two requests arrive ---

    def add(self, req: Req, room: int, now: float) -> None:
        """Add a client's request to its room, which is opened if the decode has not done so."""
        self._now = now
        self._left.take(room)  # left by an earlier request
        if self._declined.take(room) is not None:
            self._end_declined(req)
            self._left.add(room, "declined", now)  # the tombstone may stem from an earlier request
            return
        over = self._given_up.take(room)
        if over is not None:
            self._scheduler.fail(req, 503, f"the decode instance gave the hand-over up: {over}")
            self._left.add(room, over, now)  # if both sides reuse a room too soon, both are notified
            return
        sender = self.rooms.get(room)
        if sender is None:
            sender = self.rooms[room] = KVSender(room, now, now + self._limits.bootstrap)
        elif sender.req is not None:
            text = f"bootstrap_room {room} is in use; draw a fresh one for every request"
            self._scheduler.fail(req, 400, text, "invalid_request_error")
            return
        sender.req = req
        self._unclaimed.drop(sender.peer, room)
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
        """Note that a decode will ask for this room when it has memory. The decode limits how long that may take."""
        self._opened(peer, msg.handover, 0, now)

    def on_forecast_request(self, peer: Peer, msg: ForecastRequest, now: float) -> None:
        """Send a forecast to a decode that has memory for this room and decides by the forecast."""
        sender = self._opened(peer, msg.handover, 0, now)
        if sender is not None and sender.asks is None and sender.request is None:
            sender.asks = True
            self.estimates.tell(sender, now)

    def on_declined(self, peer: Peer, msg: Declined, now: float) -> None:
        """End a room with a prompt that the decode computes itself. This is not a failure."""
        handover = msg.handover
        self._now = now
        sender = self.rooms.get(handover.room)
        if handover in self._over or (sender is not None and sender.handover not in (None, handover)):
            return
        if sender is not None and sender.request is not None:
            self._drain(sender, 409, "the decode instance declined what it had asked for")
            return
        req = sender.req if sender is not None else None
        if sender is not None:
            self._unclaimed.drop(sender.peer, sender.room)
            sender.handover = handover
            self._close(sender)
        else:
            self._note_over(handover)
            self._given_up.take(handover.room)  # left by an earlier attempt
        if req is None and self._left.take(handover.room) is None:
            self._declined.add(handover.room, "declined", now)
        elif req is not None and not req.is_ended:
            self._end_declined(req)

    def _end_declined(self, req: Req) -> None:
        text = "the decode instance computes the prompt itself"
        req.untold, req.untold_logprobs = [], []  # the client gets the decode's first token instead
        self._scheduler.end(req, ReqState.MOVED, FinishReason(FinishType.DECLINED, message=text))

    def _opened(self, peer: Peer, handover: HandoverId, nbytes: int, now: float) -> KVSender | None:
        """Return the room of ``handover``, assigned to ``peer``. A missing room is opened.

        ``nbytes`` is the size of the page numbers that the peer's message brings. Returns None if the room belongs to
        another decode or attempt, has ended, or is one too many. The peer is notified in these cases.
        """
        room = handover.room
        self._now = now
        if handover in self._over:
            return None  # the peer knows that it has ended, and may have reused the pages
        sender = self.rooms.get(room)
        if sender is not None and sender.withdrawn and sender.peer is peer and handover.epoch == peer.epoch:
            if sender.handover not in (None, handover):
                assert sender.handover is not None
                self._note_over(sender.handover)
            sender.handover, sender.withdrawn = handover, False
        if sender is not None and sender.handover not in (None, handover):
            whose = "in use" if sender.peer is peer else "another decode's"
            self._deny(peer, handover, 409, f"bootstrap_room {room} is {whose}")
            return None
        if sender is None:
            self._given_up.take(room)  # left by an earlier attempt
            self._declined.take(room)
            over = self._left.take(room)
            if over is not None:
                self._deny(peer, handover, 503, f"the prefill instance gave up: {over}")
                return None
        if sender is None or sender.req is None:
            too_many = self._unclaimed.admit(peer, room, nbytes)
            if too_many is not None:
                self._deny(peer, handover, 503, too_many)
                return None
        if sender is None:
            sender = self.rooms[room] = KVSender(room, now, now + self._limits.bootstrap)
        sender.peer, sender.handover = peer, handover
        return sender

    def _deny(self, peer: Peer, handover: HandoverId, status: int, reason: str) -> None:
        self._note_over(handover)
        peer.send(TransferFailed(peer.epoch, handover, status, shown(reason, REASON_CHARS)))

    def on_request(self, peer: Peer, msg: TransferRequest, now: float) -> None:
        """Start the transfer to a decode that has memory for a room's KV, as soon as the client's request is here."""
        known = self.rooms.get(msg.handover.room)
        if known is not None and known.handover == msg.handover and known.request is not None:
            self._drain(known, 409, f"bootstrap_room {known.room} was asked for twice")
            return
        sender = self._opened(peer, msg.handover, sum(map(len, msg.dst_pages)), now)
        if sender is None:
            return
        sender.request = msg
        self.estimates.is_decided(sender)
        self._try_start(sender, now)

    def on_withdraw(self, peer: Peer, msg: Withdraw, now: float) -> None:
        """Give the memory that a decode has offered back to it, unless the prompt has begun or is about to begin.

        A prompt is about to begin if this instance is withdrawing other memory for it. Such withdrawals can form a
        circle of instances. In every circle one instance has a larger epoch than the peer that asks it. That instance
        gives the memory back. See ``scheduler/claims.py``.
        """
        self._now = now
        sender = self.rooms.get(msg.handover.room)
        if sender is None or sender.peer is not peer or sender.handover != msg.handover or sender.request is None:
            return  # it crossed the end of the room, or an abort; the decode learns of these by other messages
        req = sender.req
        begun = sender.state not in (SenderState.BOOTSTRAPPING, SenderState.QUEUED)
        begun = begun or (req is not None and (req.hold is not None or req.is_ended))
        begun = begun or (req is not None and self._epoch < peer.epoch and self._scheduler.planner.claims.asks_for(req))
        if not begun:
            sender.state, sender.request, sender.run, sender.withdrawn = SenderState.BOOTSTRAPPING, None, None, True
            if req is not None:
                self._scheduler.peer_requests.take_back(req)
            else:
                self._unclaimed.drop(peer, sender.room)
                self._unclaimed.admit(peer, sender.room, 0)
        peer.send(Withdrawn(peer.epoch, msg.handover, begun=begun))

    def _try_start(self, sender: KVSender, now: float) -> None:
        req, request = sender.req, sender.request
        if req is None:
            return
        if request is None:
            may_be_wanted = self._leaves_whole(req) and not self._choice.would_decline(req)
            if may_be_wanted and self._scheduler.peer_requests.may_compute_ahead(req):
                sender.state = SenderState.AHEAD
                self._scheduler.enqueue(req, now)
            return
        sender.run = run = self._scheduler.memory.pinned.run(
            request.decode_prefix_len, req.prompt_len, goes_on=req.prompt_len - 1
        )
        problem = self._mismatch(req, request, run)
        if problem is not None:
            self._drain(sender, 409, problem)
            return
        sender.next_page = run.begin
        ahead = sender.state is SenderState.AHEAD
        sender.state, sender.deadline = SenderState.QUEUED, now + self._limits.queue
        sender.told_at = now
        if not ahead:
            self._scheduler.enqueue(req, now)
            req.phases.mark(now)
            return
        req.times.ready = now
        req.phases.mark(now)
        push = self.chunk_planned(req) if req.hold is not None else None
        if push is not None:
            # Queued in the order of the steps, so that the steps that compute these pages run first.
            self._scheduler.outbox.to_worker(push)
        if sender.first is not None:
            req.phases.enter(Phase.TRANSFER, now)
            self.on_prompt_computed(req, *sender.first)

    def _leaves_whole(self, req: Req) -> bool:
        """Return whether a prompt's KV is too small to be pushed layer by layer.

        Pushing by layers requires the decode's request before the step begins. For a long prompt that is worth more
        than an early start.
        """
        run = self._scheduler.memory.pinned.run(0, req.prompt_len, goes_on=req.prompt_len - 1)
        groups = self._scheduler.worker.layout.groups
        nbytes = sum(pages * group.page_bytes for pages, group in zip(run.counts, groups, strict=True))
        return nbytes <= MIN_AHEAD_BYTES

    def _mismatch(self, req: Req, request: TransferRequest, run: PageRun) -> str | None:
        if request.prompt_len != req.prompt_len or request.prompt_digest != digest_of(req, req.prompt_len):
            return f"bootstrap_room {request.handover.room} means another prompt on the decode instance"
        offered = [len(pages) // 4 for pages in request.dst_pages]
        bad_prefix = request.decode_prefix_len % self._page_size or not 0 <= request.decode_prefix_len <= req.prompt_len
        if bad_prefix or offered != run.counts:
            return f"the decode instance offers {_told(offered)} pages where {_told(run.counts)} are needed"
        return None

    # --- the request computes ---

    def chunk_planned(self, req: Req) -> SendPages | None:
        """Return the pages to push after the step that is about to be sent to the worker, or None."""
        sender = self._of(req)
        if sender is None or sender.state in (SenderState.AHEAD, SenderState.DRAINING):
            return None
        assert sender.request is not None
        assert sender.handover is not None
        assert sender.run is not None
        sender.state = SenderState.PUSHING
        self._advanced(sender)
        run, last = sender.run, req.computed >= req.prompt_len
        end = run.end if last else req.computed // self._page_size
        start = sender.next_page
        if end <= start and not last:
            return None
        if sender.hold is None:
            sender.hold = self._scheduler.memory.pinned.pin(req)
        src = self._scheduler.memory.pinned.pages_in(sender.hold, run, start, end)
        theirs = zip(sender.request.dst_pages, run.places(start, end), strict=True)
        dst = [pack_i32(unpack_i32(pages)[part]) for pages, part in theirs]
        sender.next_page = max(start, end)
        return SendPages(sender.handover, [pack_i32(pages) for pages in src], dst, last, sender.request.checksum)

    def on_prompt_computed(self, req: Req, token: int, logprob: TokenLogprob | None) -> None:
        """Send the first token of a computed prompt to the decode, so that its client need not wait for the KV."""
        sender = self._of(req)
        if sender is None or sender.state is SenderState.DRAINING:
            return
        if sender.state is SenderState.AHEAD:
            sender.first = token, logprob
            req.phases.enter(Phase.QUEUE, self._scheduler.now, at="decode")
            return
        peer, handover = sender.peer, sender.handover
        assert peer is not None
        assert handover is not None
        sender.computed = True
        self._advanced(sender)
        timing = timing_for_decode(req, None, self._scheduler.now)
        scores, beyond = req.input_logprobs, req.cached_beyond
        peer.send(FirstToken(peer.epoch, handover, token, req.cached_tokens, timing, logprob, scores, beyond))
        self._finish_if_whole(sender)

    def on_progress(self, event: SendProgress) -> None:
        """Record that more bytes of a hand-over have landed at the decode."""
        sender = self.rooms.get(event.handover.room)
        if sender is None or sender.handover != event.handover or sender.state is not SenderState.PUSHING:
            return
        if event.nbytes > sender.landed:
            sender.landed = event.nbytes
            self._advanced(sender)

    def _advanced(self, sender: KVSender) -> None:
        """Restart the time limit of a hand-over, and report the progress so that the decode restarts its own.

        Reports are at least ``PROGRESS_SECONDS`` apart.
        """
        sender.deadline = self._now + (self._limits.transfer if sender.computed else self._limits.piece)
        if self._now - sender.told_at < PROGRESS_SECONDS or sender.peer is None or sender.handover is None:
            return
        assert sender.req is not None
        assert sender.run is not None
        sender.told_at = self._now
        computed = sender.run.end if sender.computed else sender.req.computed // self._page_size
        pages = computed + delivered_pages(self._scheduler.worker.layout, sender.run, sender.landed)
        sender.peer.send(Progress(sender.peer.epoch, sender.handover, pages))

    def on_send_ended(self, event: SendEnded) -> None:
        """Release the pages of a hand-over, which the worker will not touch again."""
        sender = self.rooms.get(event.handover.room)
        if sender is None or sender.handover != event.handover:
            return
        draining = sender.state is SenderState.DRAINING
        if draining and not event.cancelled:
            return  # it crossed our CancelSend; the answer to that is under way and must find this room
        if sender.hold is not None:
            self._scheduler.memory.pinned.unpin(sender.hold)
            sender.hold = None
        sender.sent = event
        self.bytes_sent += event.nbytes
        self.push_seconds += event.seconds
        if draining:
            self._drained(sender)
        elif event.error is not None or event.cancelled:
            self._drain(sender, 502, f"the KV transfer failed: {event.error or 'cancelled'}")
        else:
            self._finish_if_whole(sender)

    def _finish_if_whole(self, sender: KVSender) -> None:
        req, peer, handover, request = sender.req, sender.peer, sender.handover, sender.request
        if not sender.computed or sender.sent is None or sender.state is SenderState.DRAINING:
            return
        assert req is not None
        assert request is not None
        assert peer is not None
        assert handover is not None
        debug, hashes = self._scheduler.memory.debug, b""
        if request.hashes:
            if sender.looks is None:
                sender.looks = debug.newest
                if not debug.when_past(sender.looks, lambda: self._finish_if_whole(sender)):
                    return
            hashes = debug.told(req, request.decode_prefix_len // self._page_size, req.prompt_len // self._page_size)
        req.timing.transfer_bytes = sender.sent.nbytes
        req.timing.push_ms = sender.sent.seconds * 1000
        timing = timing_for_decode(req, sender.sent, self._scheduler.now)
        peer.send(TransferDone(peer.epoch, handover, sender.sent.slices, timing, hashes))
        self._close(sender)
        self.done += 1
        self._scheduler.end(req, ReqState.FINISHED, FinishReason(FinishType.LENGTH))

    # --- the ways out ---

    def cancel(self, req: Req, reason: str) -> None:
        """Drain the room of a request that ended here: its client left, or it failed."""
        sender = self._of(req)
        if sender is not None:
            self._drain(sender, 499 if req.state is ReqState.ABORTED else 500, reason)

    def on_too_long(self, peer: Peer, msg: FirstToken) -> None:
        """Fail a hand-over with logprobs that exceed the peer's frame limit."""
        sender = self.rooms.get(msg.handover.room)
        if sender is not None and sender.handover == msg.handover:
            text = f"the prompt's logprobs are longer than {LONG_FRAME_BYTES >> 20} MiB; ask for fewer top_logprobs"
            self._drain(sender, 400, text)

    def on_abort(self, peer: Peer, msg: Abort, now: float) -> None:
        """End a room that the decode gives up, and acknowledge it when nothing is written any more."""
        handover = msg.handover
        self._now = now
        sender = self.rooms.get(handover.room)
        if handover in self._over or (sender is not None and sender.handover not in (None, handover)):
            peer.send(AbortAck(peer.epoch, handover))
            return
        if sender is None:
            self._given_up.add(handover.room, msg.reason, now)
            peer.send(AbortAck(peer.epoch, handover))
            return
        sender.peer, sender.handover, sender.abort_asked = peer, handover, True
        if sender.req is not None and not sender.req.is_ended:
            self._scheduler.end(sender.req, ReqState.ABORTED, FinishReason(FinishType.ABORT, message=msg.reason))
        if sender.state is not SenderState.DRAINING:
            self._drain(sender, 499, msg.reason)

    def on_gone(self, peer: Peer) -> None:
        """Drain the rooms of a decode that died or fell silent."""
        for sender in [s for s in self.rooms.values() if s.peer is peer]:
            self._drain(sender, 502, f"the decode instance is gone: {peer.reason}")

    def tick(self, now: float) -> None:
        """Send due forecasts, and drain rooms past their deadline."""
        self._now = now
        self._make_room(now)
        for sender in list(self.rooms.values()):
            self.estimates.tell(sender, now)
            if now < sender.deadline or sender.state is SenderState.DRAINING:
                continue
            if sender.state is SenderState.PUSHING:
                limit = self._limits.transfer if sender.computed else self._limits.piece
                self._drain(sender, 504, f"the hand-over made no progress for {limit:.0f} s")
            elif sender.state is SenderState.QUEUED:
                text = f"the prompt's turn to be computed did not come within {self._limits.queue:.0f} s"
                self._drain(sender, 504, text)
            elif sender.req is None:
                text = f"no request for this room reached the prefill instance within {self._limits.bootstrap:.0f} s"
                self._drain(sender, 504, text)
            elif sender.peer is None:
                text = f"no decode instance asked for this room within {self._limits.bootstrap:.0f} s"
                self._drain(sender, 504, text)
        self._given_up.expire(now)
        self._left.expire(now)
        self._declined.expire(now)

    def _make_room(self, now: float) -> None:
        """Free memory of finished prompts that no decode has asked for, if other requests wait for memory."""
        done = [s for s in self.rooms.values() if s.state is SenderState.AHEAD and s.first is not None]
        for sender in done if done and self._scheduler.planner.lacks_memory(now) else ():
            assert sender.req is not None
            sender.state, sender.first = SenderState.BOOTSTRAPPING, None
            self._scheduler.peer_requests.start_over(sender.req)

    def info(self, now: float) -> list[dict[str, Any]]:
        """Return the open rooms for ``/transfers``."""
        return [
            {
                "direction": "sending",
                "room": sender.room,
                "state": sender.state.name.lower(),
                "rid": sender.req.rid if sender.req is not None else None,
                "peer": sender.peer.epoch if sender.peer is not None else None,
                "seconds": round(now - sender.since, 3),
                "prompt_tokens": sender.req.prompt_len if sender.req is not None else None,
                "reason": sender.failure[1] if sender.failure is not None else None,
            }
            for sender in self.rooms.values()
        ]

    def pinned(self) -> list[KVHold]:
        """Return memory that the worker may still read."""
        return [s.hold for s in self.rooms.values() if s.hold is not None]

    def _of(self, req: Req) -> KVSender | None:
        if req.msg.bootstrap is None:
            return None
        sender = self.rooms.get(req.msg.bootstrap.room)
        return sender if sender is not None and sender.req is req else None

    def _drain(self, sender: KVSender, status: int, reason: str) -> None:
        if sender.state is SenderState.DRAINING:
            return
        sender.state, sender.failure = SenderState.DRAINING, (status, reason)
        if sender.req is not None and not sender.req.is_ended:
            self._scheduler.fail(sender.req, status, reason, "transfer_error")
        if sender.hold is not None:
            assert sender.handover is not None
            self._scheduler.outbox.to_worker(CancelSend(sender.handover))
        else:
            self._drained(sender)

    def _close(self, sender: KVSender) -> None:
        del self.rooms[sender.room]
        self.estimates.is_decided(sender)
        if sender.handover is not None:
            self._note_over(sender.handover)

    def _note_over(self, handover: HandoverId) -> None:
        self._over[handover] = None
        if len(self._over) > MAX_OVER:
            del self._over[next(iter(self._over))]

    def _drained(self, sender: KVSender) -> None:
        assert sender.failure is not None
        status, reason = sender.failure
        self._close(sender)
        self.failed += 1
        self._unclaimed.drop(sender.peer, sender.room)
        # A stranger can open and end any number of rooms without a request: keep them out of the info log.
        if sender.req is None:
            log.debug("room %d is off: %s", sender.room, reason)
        else:
            log.info("room %d is off: %s", sender.room, reason, extra={"rid": sender.req.rid})
        peer, handover = sender.peer, sender.handover
        if peer is None or handover is None:
            # The decode has not asked yet; when it does, it gets the failure at once.
            self._left.add(sender.room, reason, self._now)
            return
        if sender.req is None and not peer.gone:
            # The client's request, when it comes, gets the failure at once, too. A peer that is gone leaves no trace:
            # its room need not concern the client's request.
            self._given_up.add(sender.room, reason, self._now)
        if sender.abort_asked:
            peer.send(AbortAck(peer.epoch, handover))
            return
        self._deny(peer, handover, status, reason)
        if sender.withdrawn and sender.req is not None and not peer.gone:
            # The decode has ended that attempt, and its next one is on its way.
            self._left.add(sender.room, reason, self._now)


def _told(counts: list[int]) -> str:
    """Format the page counts of all groups for a log line or an error message."""
    return " and ".join(map(str, counts))


METRICS: Metrics[SenderTable] = (
    counter("pdserve_kv_sent_bytes_total", "KV sent to other instances.", lambda s: s.bytes_sent),
    counter("pdserve_kv_push_seconds_total", "Time spent sending KV to other instances.", lambda s: s.push_seconds),
    counter(
        "pdserve_handovers_sent_total",
        "Hand-overs sent that are over.",
        lambda s: {"done": s.done, "failed": s.failed},
        "outcome",
        note="Outcomes: `done`, `failed`.",
    ),
    gauge("pdserve_handovers_sent_open", "Hand-overs sent that are under way.", lambda s: len(s.rooms)),
)
