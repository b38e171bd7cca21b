"""Placement of prompts that wait in PREALLOCATED: the prefill's forecast, our own store, and the decision.

A prompt may also be computed here without a forecast, because it is short. In both cases its room is DECLINED until the
prefill is notified.
"""

from __future__ import annotations

from collections.abc import Callable

from ...messages.handover import Declined, Forecast, ForecastRequest
from ...scheduler.scheduler import Scheduler
from .kv_receiver import KVReceiver, ReceiverState, StoreStage
from .limits import HandoverLimits
from .peer import Peer
from .placement_policy import PlacementPolicy
from .receiver_rooms import ReceiverRooms
from .store_first import StoreFirst

MOST_UNTOLD = 1024
"""Maximum DECLINED rooms that wait to notify their prefill. Prefills of further rooms run into their own time limit."""


class PlacementStage:
    """Decisions for the rooms of one instance, which computes their prompts: this one or their prefill."""

    def __init__(
        self,
        scheduler: Scheduler,
        rooms: ReceiverRooms,
        limits: HandoverLimits,
        peer_at: Callable[[str, int, float], Peer],
        policy: PlacementPolicy,
    ) -> None:
        self._scheduler = scheduler
        self._rooms = rooms
        self._limits = limits
        self._peer_at = peer_at
        self._policy = policy
        self.store_first = StoreFirst(scheduler, policy)
        self._untold = 0
        """Number of DECLINED rooms. Only ``tell_declined`` closes them."""

    def on_forecast(self, peer: Peer, msg: Forecast, now: float) -> None:
        """Record the prefill's forecast of its time to the first token, in milliseconds; ``decide`` uses it.

        Ignore a forecast for a prompt with a placement that is decided, or for a room that is not open.
        """
        receiver = self._rooms.known(peer, msg.handover)
        # A room that gave its memory back is QUEUED and still takes the forecast: a prefill sends one for each room.
        states = (ReceiverState.QUEUED, ReceiverState.PREALLOCATED)
        if receiver is not None and not receiver.decided and receiver.state in states:
            receiver.there_ms = msg.ms

    def decide(self, receiver: KVReceiver, now: float) -> None:
        """Decide which instance computes the prompt, once the prefill's forecast and the store's answer are known.

        The first call asks for both. If it is computed here, begin, and notify the prefill.
        """
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
        if self._policy.is_here(req, receiver.peer.epoch, there_ms, receiver.prefix_len, pages, now):
            self.compute_here(receiver, now)
            self.tell_declined(receiver, now)

    def compute_here(self, receiver: KVReceiver, now: float) -> None:
        """Compute the prompt here: in the memory taken for its KV, or by queueing it if it has none.

        Its KV must not have been asked for, so that no peer may write to the memory.
        """
        receiver.state, receiver.decided = ReceiverState.DECLINED, True
        self._untold += 1
        receiver.deadline = now + self._limits.bootstrap
        if receiver.memory is None:
            self._scheduler.peer_requests.recompute(receiver.req, now)
            return
        receiver.memory.hold.verified = True
        self._scheduler.memory.pinned.unpin(receiver.memory.hold)
        receiver.memory = None
        self._scheduler.peer_requests.compute_here(receiver.req, now)

    def tell_declined(self, receiver: KVReceiver, now: float) -> None:
        """Notify the prefill that the prompt is computed here, and close the room.

        If the prefill is not connected, wait for it or dial it once more. If it can't be reached, it has a time limit
        of its own.
        """
        if receiver.peer.same_as is not None:
            receiver.peer = receiver.peer.same_as
        peer = receiver.peer
        if peer.readable:
            peer.send(Declined(peer.epoch, receiver.handover))
        elif now <= receiver.deadline and self._untold <= MOST_UNTOLD:
            where = receiver.req.msg.bootstrap
            if not peer.gone:
                return
            if where is not None and not receiver.tried_again:
                receiver.tried_again = True
                receiver.peer = self._peer_at(where.host, where.port, now)
                return
        self._untold -= 1
        self._rooms.forget(receiver)
