"""The open rooms of hand-overs from this instance, and how a room ends.

A failed room *drains*: the worker is told to cancel, and its ``SendEnded`` confirms that nothing more is read here or
written there. Only then are the pages freed and the decode notified. What ended is remembered for a while, because
messages about it may be on their way.
"""

from __future__ import annotations

import logging

from ...mem_cache.base_prefix_cache import KVHold
from ...messages.base import REASON_CHARS, HandoverId
from ...messages.decode import shown
from ...messages.handover import AbortAck, TransferFailed
from ...messages.worker import CancelSend
from ...scheduler.req import Req
from ...scheduler.scheduler import Scheduler
from .failure import Failure
from .kv_sender import KVSender, SenderState
from .limits import HandoverLimits
from .peer import Peer
from .prefill_estimates import PrefillEstimates
from .unclaimed_rooms import Tombstones, UnclaimedRooms

log = logging.getLogger(__name__)

MAX_OVER = 1 << 14
"""Maximum number of ended hand-overs that are remembered."""


class SenderRooms:
    """Owner of the open rooms, by bootstrap room, and of the traces of ended ones."""

    def __init__(self, scheduler: Scheduler, limits: HandoverLimits) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self.by_number: dict[int, KVSender] = {}
        self.unclaimed = UnclaimedRooms()
        self.given_up = Tombstones()
        """Rooms that a decode gave up before the client's request came."""
        self.left = Tombstones()
        """Rooms with a request that ended before the decode's message came."""
        self.declined = Tombstones()
        """Rooms that a decode declined, before the client's request came, because it computes the prompt itself."""
        self.estimates = PrefillEstimates(scheduler.estimator, scheduler.tiers)
        self._over: dict[HandoverId, None] = {}
        """Latest hand-overs that ended or were refused here, oldest first. Late messages about them open no room."""
        self._now = 0.0
        self.failed = 0

    @property
    def now(self) -> float:
        """Time of the present tick (``time.monotonic()``)."""
        return self._now

    def set_time(self, now: float) -> None:
        """Set the time of the present tick, from which time limits are counted."""
        self._now = now

    def open(self, room: int, now: float) -> KVSender:
        """Open bootstrap room ``room``, which must not be open yet, and return its sender.

        The client's request and the decode's request both name the room. The second one must come within
        ``HandoverLimits.bootstrap`` seconds of ``now``.
        """
        sender = self.by_number[room] = KVSender(room, now, now + self._limits.bootstrap)
        return sender

    def of(self, req: Req) -> KVSender | None:
        """Return the open room of a request, or None if it has none."""
        if req.msg.bootstrap is None:
            return None
        sender = self.by_number.get(req.msg.bootstrap.room)
        return sender if sender is not None and sender.req is req else None

    def pinned(self) -> list[KVHold]:
        """Return the holds of memory that the worker may still read for transfers."""
        transfers = [sender.transfer for sender in self.by_number.values()]
        return [t.hold for t in transfers if t is not None and t.hold is not None]

    def is_over(self, handover: HandoverId) -> bool:
        """Return whether a hand-over has lately ended or was refused here, so that messages about it open no room."""
        return handover in self._over

    def note_over(self, handover: HandoverId) -> None:
        """Remember that a hand-over has ended or is refused, and forget the oldest such one above ``MAX_OVER``."""
        self._over[handover] = None
        if len(self._over) > MAX_OVER:
            del self._over[next(iter(self._over))]

    def deny(self, peer: Peer, handover: HandoverId, status: int, reason: str) -> None:
        """Tell the decode ``peer`` that its hand-over has failed or is refused, and remember that. Change no room."""
        self.note_over(handover)
        peer.send(TransferFailed(peer.epoch, handover, status, shown(reason, REASON_CHARS)))

    def expire(self, now: float) -> None:
        """Drop the records of ended rooms that have lasted ``TOMBSTONE_SECONDS`` at ``now``."""
        for tombstones in (self.given_up, self.left, self.declined):
            tombstones.expire(now)

    # --- ending a room ---

    def drain(self, sender: KVSender, status: int, reason: str) -> None:
        """End a room without success, and fail its request with ``status``. It is closed when the worker reads no more
        for it.

        Do nothing if that is under way.
        """
        if sender.state is SenderState.DRAINING:
            return
        sender.state, sender.failure = SenderState.DRAINING, Failure(status, reason)
        if sender.req is not None and not sender.req.is_ended:
            self._scheduler.fail(sender.req, status, reason, "transfer_error")
        transfer = sender.transfer
        if transfer is not None and transfer.hold is not None:
            self._scheduler.outbox.to_worker(CancelSend(transfer.decode.handover))
        else:
            self.drained(sender, sender.failure)

    def close(self, sender: KVSender) -> None:
        """Remove a room, with its load in forecasts, and remember its hand-over as ended: late messages open no room.

        The decode is not notified, and the request and its memory stay as they are.
        """
        del self.by_number[sender.room]
        self.estimates.is_decided(sender)
        if sender.decode is not None:
            self.note_over(sender.decode.handover)

    def drained(self, sender: KVSender, failure: Failure) -> None:
        """Remove a failed room, for which the worker reads no more, and tell its decode.

        If the client's request or the decode's first message has not come, remember the failure. It is the answer when
        that comes.
        """
        reason = failure.reason
        self.close(sender)
        self.failed += 1
        self.unclaimed.drop(sender.peer, sender.room)
        # A stranger can open and end any number of rooms without a request: keep them out of the info log.
        if sender.req is None:
            log.debug("room %d is off: %s", sender.room, reason)
        else:
            log.info("room %d is off: %s", sender.room, reason, extra={"rid": sender.req.rid})
        if sender.decode is None:
            # The decode has not asked yet; when it does, it gets the failure at once.
            self.left.add(sender.room, failure, self._now)
            return
        peer, handover = sender.decode.peer, sender.decode.handover
        if sender.req is None and not peer.gone:
            # The client's request, when it comes, gets the failure at once, too. A peer that is gone leaves no trace:
            # its room need not concern the client's request.
            self.given_up.add(sender.room, failure, self._now)
        if sender.abort_asked:
            peer.send(AbortAck(peer.epoch, handover))
            return
        self.deny(peer, handover, *failure)
        if sender.withdrawn and sender.req is not None and not peer.gone:
            # The decode has ended that attempt, and its next one is on its way.
            self.left.add(sender.room, failure, self._now)
