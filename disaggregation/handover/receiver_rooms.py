"""The open rooms of hand-overs to this instance, and how a room ends.

A room is DRAINING while its prefill may still write, or while the worker checks its pages, because the check may
rewrite them. After that its memory is freed.
"""

from __future__ import annotations

import itertools
import logging

from ...mem_cache.base_prefix_cache import KVHold
from ...messages.base import REASON_CHARS, HandoverId
from ...messages.decode import shown
from ...messages.handover import Abort
from ...messages.worker import RevokePages
from ...scheduler.req import Req
from ...scheduler.scheduler import Scheduler
from .kv_receiver import KVReceiver, ReceiverMemory, ReceiverState
from .peer import Peer

log = logging.getLogger(__name__)

STUCK_SECONDS = 10.0
"""Seconds after which an operator is warned of memory that a peer still holds."""


class ReceiverRooms:
    """Owner of the open rooms, by bootstrap room."""

    def __init__(self, scheduler: Scheduler, epoch: str) -> None:
        self._scheduler = scheduler
        self._epoch = epoch
        self._attempts = itertools.count(1)
        self.by_number: dict[int, KVReceiver] = {}
        self._by_req: dict[Req, KVReceiver] = {}
        self.failed = 0

    def draw_id(self, room: int) -> HandoverId:
        """Return a new hand-over id for a further attempt of the bootstrap room ``room``."""
        return HandoverId(self._epoch, room, next(self._attempts))

    def open(self, receiver: KVReceiver) -> None:
        """Add a room. No open room may have its number or its request."""
        self.by_number[receiver.handover.room] = self._by_req[receiver.req] = receiver

    def forget(self, receiver: KVReceiver) -> None:
        """Remove a room, and nothing else."""
        del self.by_number[receiver.handover.room], self._by_req[receiver.req]

    # --- finding rooms ---

    def in_state(self, state: ReceiverState) -> list[KVReceiver]:
        """Return the rooms in ``state``."""
        return [receiver for receiver in self.by_number.values() if receiver.state is state]

    def preallocated(self) -> list[tuple[KVReceiver, ReceiverMemory]]:
        """Return the rooms that have memory but have not asked the prefill for KV (PREALLOCATED), with that memory."""
        return [(r, r.memory) for r in self.in_state(ReceiverState.PREALLOCATED) if r.memory is not None]

    def of_peer(self, peer: Peer) -> list[KVReceiver]:
        """Return the rooms with KV that comes from ``peer``, in any state."""
        return [receiver for receiver in self.by_number.values() if receiver.peer is peer]

    def of(self, req: Req) -> KVReceiver | None:
        """Return the open room of a request, or None if it has none."""
        return self._by_req.get(req)

    def known(self, peer: Peer, handover: HandoverId) -> KVReceiver | None:
        """Return the open room that a message of ``peer`` is about; None if there is none for that attempt and peer."""
        receiver = self.by_number.get(handover.room)
        if receiver is None or receiver.handover != handover or receiver.peer is not peer:
            # Usually the answer to an abort of a room that had nothing to drain.
            log.debug("dropped a message of %s for room %d, which is not open", peer.epoch, handover.room)
            return None
        return receiver

    def pinned(self) -> list[KVHold]:
        """Return the holds of all rooms with memory: a prefill or this instance's worker may still write it."""
        return [r.memory.hold for r in self.by_number.values() if r.memory is not None]

    def warning(self, now: float) -> str | None:
        """Return a warning about memory of ended rooms that hanging peers have kept for long, or None."""
        stuck = [r for r in self.in_state(ReceiverState.DRAINING) if now - r.draining_since > STUCK_SECONDS]
        if not stuck:
            return None
        tokens = sum(r.length - r.prefix_len for r in stuck)
        peers = ", ".join(sorted({r.peer.epoch for r in stuck}))
        return (
            f"the KV memory of {len(stuck)} hand-overs ({tokens} tokens) can't be used again before instance {peers} "
            "has let go of it: it hangs; end it"
        )

    # --- ending a room ---

    def let_go(self, receiver: KVReceiver, reason: str, now: float) -> None:
        """End a room without its KV, and tell the prefill. Its memory is freed at once if nothing can write to it.

        Otherwise it is freed when the prefill has confirmed, or its link is down, and no check is under way. Do nothing
        for a DRAINING or DECLINED room.
        """
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
            self.begin_draining(receiver, now)
        else:
            self.drained(receiver, now)

    def begin_draining(self, receiver: KVReceiver, now: float) -> None:
        """Set a room to DRAINING: it has ended, and its memory is kept until nothing can write to it."""
        if receiver.state is not ReceiverState.DRAINING:
            receiver.state, receiver.draining_since = ReceiverState.DRAINING, now

    def drained(self, receiver: KVReceiver, now: float) -> None:
        """Close a failed room that no peer writes to. While our worker checks its pages, keep it DRAINING."""
        if receiver.check is not None:
            self.begin_draining(receiver, now)
            return
        self.failed += 1
        self.close(receiver)

    def close(self, receiver: KVReceiver) -> None:
        """Remove a room: revoke the prefill's permission to write its pages, and unpin its memory.

        The memory is freed now if its request has ended. Otherwise the request keeps it.
        """
        self.forget(receiver)
        self.revoke(receiver)
        if receiver.memory is not None:
            self._scheduler.memory.pinned.unpin(receiver.memory.hold)

    def revoke(self, receiver: KVReceiver, *, are_checked: bool = False) -> None:
        """Have the worker end the prefill's permission to write the room's pages, if it has one.

        ``are_checked``: keep the checksums noted while pages arrived, because ``VerifyPages`` follows.
        """
        if receiver.granted:
            receiver.granted = False
            self._scheduler.outbox.to_transfer(RevokePages(receiver.handover, are_checked))
