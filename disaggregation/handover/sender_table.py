"""The prefill's side of hand-overs.

A ``KVSender`` is one room. It begins with whichever comes first, the client's request or the decode's
``TransferRequest``::

    request + TransferRequest → enqueued → chunk_planned* pushes pages → first_token → FirstToken
                                                              └─ SendEnded, and the first token → TransferDone

An instance that has nothing else to compute does not wait for the decode with a short prompt: it begins with the
request alone, and pushes what it has when it is asked. What is done before that keeps its memory until another request
waits for some: two instances would wait for each other's else.

Off that path the room *drains*: the worker is told to cancel, and only its ``SendEnded`` (nothing more is read here or
written there) frees the pages and lets the decode know, by ``TransferFailed`` or ``AbortAck``. A request that ends
early leaves a tombstone for a while, so that the other leg, arriving late, is told at once instead of waiting.

The client's request knows the room only, so rooms are what the two meet by. From the decode's first word on it is one
attempt of that decode (``HandoverId``), and nothing that is said or done for another touches it.
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
from .kv_sender import KVSender, SenderState, digest_of, landed_pages, timing_for_decode
from .limits import HandoverLimits
from .peer import Peer
from .placement_policy import PlacementPolicy
from .prefill_estimates import PrefillEstimates
from .unclaimed_rooms import Tombstones, UnclaimedRooms

log = logging.getLogger(__name__)

MAX_OVER = 1 << 14


class SenderTable:
    """Owner of all rooms of a prefill instance."""

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
        """Rooms that a decode gave up before the request came."""
        self._left = Tombstones()
        """Rooms whose request ended before a decode came."""
        self._declined = Tombstones()
        """Rooms whose decode computes the prompt itself, before the request came."""
        self.foretelling = PrefillEstimates(scheduler.estimator, scheduler.tiers)
        self._over: dict[HandoverId, None] = {}
        """The latest that ended here, or were refused: news of them may still come, and opens nothing."""
        self._now = 0.0
        self.done = 0
        self.failed = 0
        self.bytes_sent = 0
        self.push_seconds = 0.0

    # --- both ends turn up ---

    def add(self, req: Req, now: float) -> None:
        """A client's request for a room has come."""
        assert req.msg.bootstrap is not None
        room = req.msg.bootstrap.room
        self._now = now
        self._left.take(room)  # said of an earlier request
        if self._declined.take(room) is not None:
            self._end_declined(req)
            self._left.add(room, "declined", now)  # it may have been meant for an earlier request
            return
        over = self._given_up.take(room)
        if over is not None:
            self._scheduler.fail(req, 503, f"the decode instance gave the hand-over up: {over}")
            self._left.add(room, over, now)  # if both legs use a name again too soon, both are told
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
        self.foretelling.tell(sender, now)

    def on_queued(self, peer: Peer, msg: RoomQueued, now: float) -> None:
        """A decode will ask for this room when it has memory: how long that may take is for the decode to say."""
        self._opened(peer, msg.handover, 0, now)

    def on_forecast_request(self, peer: Peer, msg: ForecastRequest, now: float) -> None:
        """A decode has memory for this room, and decides by our forecast."""
        sender = self._opened(peer, msg.handover, 0, now)
        if sender is not None and sender.asks is None and sender.request is None:
            sender.asks = True
            self.foretelling.tell(sender, now)

    def on_declined(self, peer: Peer, msg: Declined, now: float) -> None:
        """The decode computes a room's prompt itself: that is the end of this leg, and no failure."""
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
            self._given_up.take(handover.room)  # said of an earlier attempt
        if req is None and self._left.take(handover.room) is None:
            self._declined.add(handover.room, "declined", now)
        elif req is not None and not req.is_ended:
            self._end_declined(req)

    def _end_declined(self, req: Req) -> None:
        text = "the decode instance computes the prompt itself"
        req.untold, req.untold_logprobs = [], []  # the decode's own is the first
        self._scheduler.end(req, ReqState.MOVED, FinishReason(FinishType.DECLINED, message=text))

    def _opened(self, peer: Peer, handover: HandoverId, nbytes: int, now: float) -> KVSender | None:
        """The room, ``peer``'s from now on, which brings ``nbytes`` of page numbers; a new one where there is none.

        None where it is another decode's or attempt's, over already, or one too many; the peer has been told then.
        """
        room = handover.room
        self._now = now
        if handover in self._over:
            return None  # the peer has been told that it is, and may have used the pages for something else since
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
            self._given_up.take(room)  # said of an earlier attempt
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
        """A decode has memory and wants a room's KV."""
        known = self.rooms.get(msg.handover.room)
        if known is not None and known.handover == msg.handover and known.request is not None:
            self._drain(known, 409, f"bootstrap_room {known.room} was asked for twice")
            return
        sender = self._opened(peer, msg.handover, sum(map(len, msg.dst_pages)), now)
        if sender is None:
            return
        sender.request = msg
        self.foretelling.is_decided(sender)
        self._try_start(sender, now)

    def on_withdraw(self, peer: Peer, msg: Withdraw, now: float) -> None:
        """A decode needs the memory that it has offered, unless its prompt is begun or is about to be.

        It is about to be if this instance asks for memory back for it, which may go in a circle: of instances that ask
        each other at once, one has a larger epoch than the one that asks it, and gives back; see ``claims.py``.
        """
        self._now = now
        sender = self.rooms.get(msg.handover.room)
        if sender is None or sender.peer is not peer or sender.handover != msg.handover or sender.request is None:
            return  # it crossed the end of the room, or an abort; the decode is told of these
        req = sender.req
        begun = sender.state not in (SenderState.BOOTSTRAPPING, SenderState.QUEUED)
        begun = begun or (req is not None and (req.hold is not None or req.is_ended))
        begun = begun or (req is not None and self._epoch < peer.epoch and self._scheduler.planner.claims.asks_for(req))
        if not begun:
            sender.state, sender.request, sender.run, sender.withdrawn = SenderState.BOOTSTRAPPING, None, None, True
            if req is not None:
                self._scheduler.take_back(req)
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
            if may_be_wanted and self._scheduler.may_compute_ahead(req):
                sender.state = SenderState.AHEAD
                self._scheduler.enqueue(req, now)
            return
        sender.run = run = self._scheduler.memory.run(
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
            # In the order of the steps, so that those which compute these pages come before.
            self._scheduler.outbox.to_worker(push)
        if sender.first is not None:
            req.phases.enter(Phase.TRANSFER, now)
            self.first_token(req, *sender.first)

    def _leaves_whole(self, req: Req) -> bool:
        """Whether its KV is too little to be pushed by layers: that takes being asked before the step begins, and is
        worth more to a long prompt than an early beginning.
        """
        run = self._scheduler.memory.run(0, req.prompt_len, goes_on=req.prompt_len - 1)
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
        """A step that computes more of the prompt is about to be sent to the worker: what to push of it."""
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
            sender.hold = self._scheduler.memory.pin(req)
        src = self._scheduler.memory.pages_in(sender.hold, run, start, end)
        theirs = zip(sender.request.dst_pages, run.places(start, end), strict=True)
        dst = [pack_i32(unpack_i32(pages)[part]) for pages, part in theirs]
        sender.next_page = max(start, end)
        return SendPages(sender.handover, [pack_i32(pages) for pages in src], dst, last, sender.request.checksum)

    def first_token(self, req: Req, token: int, logprob: TokenLogprob | None) -> None:
        """The prompt is computed; the decode goes on from this token, and its client need not wait for the KV."""
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
        """More of a hand-over's pages have landed."""
        sender = self.rooms.get(event.handover.room)
        if sender is None or sender.handover != event.handover or sender.state is not SenderState.PUSHING:
            return
        if event.nbytes > sender.landed:
            sender.landed = event.nbytes
            self._advanced(sender)

    def _advanced(self, sender: KVSender) -> None:
        """Count the limit of a hand-over from now on, here and at the decode."""
        sender.deadline = self._now + (self._limits.transfer if sender.computed else self._limits.piece)
        if self._now - sender.told_at < PROGRESS_SECONDS or sender.peer is None or sender.handover is None:
            return
        assert sender.req is not None
        assert sender.run is not None
        sender.told_at = self._now
        computed = sender.run.end if sender.computed else sender.req.computed // self._page_size
        pages = computed + landed_pages(self._scheduler.worker.layout, sender.run, sender.landed)
        sender.peer.send(Progress(sender.peer.epoch, sender.handover, pages))

    def on_send_ended(self, event: SendEnded) -> None:
        """The worker will not touch this hand-over's pages again."""
        sender = self.rooms.get(event.handover.room)
        if sender is None or sender.handover != event.handover:
            return
        draining = sender.state is SenderState.DRAINING
        if draining and not event.cancelled:
            return  # it crossed our cancel, whose own answer is under way, and must find this room
        if sender.hold is not None:
            self._scheduler.memory.unpin(sender.hold)
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
        if debug is not None and request.hashes:
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
        """The request has ended on this side: its client left, or it failed."""
        sender = self._of(req)
        if sender is not None:
            self._drain(sender, 499 if req.state is ReqState.ABORTED else 500, reason)

    def give_up(self, handover: HandoverId, status: int, reason: str) -> None:
        """A hand-over can't be what was asked for."""
        sender = self.rooms.get(handover.room)
        if sender is not None and sender.handover == handover:
            self._drain(sender, status, reason)

    def on_abort(self, peer: Peer, msg: Abort, now: float) -> None:
        """The decode gives a room up."""
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
        """The peer died or fell silent."""
        for sender in [s for s in self.rooms.values() if s.peer is peer]:
            self._drain(sender, 502, f"the decode instance is gone: {peer.reason}")

    def tick(self, now: float) -> None:
        """Give up what has waited too long."""
        self._now = now
        self._make_room(now)
        for sender in list(self.rooms.values()):
            self.foretelling.tell(sender, now)
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
        """Let go of memory that nobody has asked for yet, where somebody waits for some."""
        done = [s for s in self.rooms.values() if s.state is SenderState.AHEAD and s.first is not None]
        for sender in done if done and self._scheduler.planner.lacks_memory(now) else ():
            assert sender.req is not None
            sender.state, sender.first = SenderState.BOOTSTRAPPING, None
            self._scheduler.start_over(sender.req)

    def info(self, now: float) -> list[dict[str, Any]]:
        """Rooms that are open, for /transfers."""
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
        """Memory that the worker may still read."""
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
        self.foretelling.is_decided(sender)
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
        # Of rooms without a request a stranger can open and end any number.
        if sender.req is None:
            log.debug("room %d is off: %s", sender.room, reason)
        else:
            log.info("room %d is off: %s", sender.room, reason, extra={"rid": sender.req.rid})
        peer, handover = sender.peer, sender.handover
        if peer is None or handover is None:
            # The decode's leg has not turned up yet; when it does, it shall not wait.
            self._left.add(sender.room, reason, self._now)
            return
        if sender.req is None and not peer.gone:
            # And so shall the client's. But that one who is gone had the room need not concern it.
            self._given_up.add(sender.room, reason, self._now)
        if sender.abort_asked:
            peer.send(AbortAck(peer.epoch, handover))
            return
        self._deny(peer, handover, status, reason)
        if sender.withdrawn and sender.req is not None and not peer.gone:
            # The decode has left that attempt, and its next one is on its way.
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
