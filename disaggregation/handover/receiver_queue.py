"""Rooms that wait for memory on the decode instance, and rooms that give it back.

``scheduler/claims.py`` decides which room is next, and which one gives its memory back because its prefill does not
begin.
"""

from __future__ import annotations

import math

from ...messages.handover import RoomQueued, Withdraw, Withdrawn
from ...messages.outputs import Phase
from ...scheduler.req import ReqState
from ...scheduler.scheduler import Scheduler
from .kv_receiver import KVReceiver, ReceiverMemory, ReceiverState, StoreStage
from .limits import HandoverLimits
from .peer import Peer
from .receiver_rooms import ReceiverRooms
from .store_first import StoreFirst


class ReceiverQueue:
    """Owner of the rooms' memory: the way from QUEUED to PREALLOCATED, and back."""

    def __init__(
        self, scheduler: Scheduler, rooms: ReceiverRooms, store_first: StoreFirst, limits: HandoverLimits
    ) -> None:
        self._scheduler = scheduler
        self._claims = scheduler.planner.claims
        self._rooms = rooms
        self._store_first = store_first
        self._limits = limits
        self.withdrawn = 0
        """Number of times a room gave its memory back because its prefill had not begun."""

    def add(self, receiver: KVReceiver, now: float) -> None:
        """Queue a room with a connected peer for memory, and tell the peer."""
        receiver.queued_at = now
        self._enter(receiver, now)
        # If the prompt may be computed here, the cached prefix must leave at least one token to compute.
        most = receiver.length if receiver.decided else min(receiver.length, receiver.req.longest_reusable_prefix)
        self._claims.add_incoming(receiver.req, most, optional=receiver.is_optional)

    def _enter(self, receiver: KVReceiver, now: float) -> None:
        receiver.state = ReceiverState.QUEUED
        if receiver.req.rid in self._scheduler.planner.arriving:
            receiver.req.times.ready = now  # not for returned KV: no client waits for it
        # The limit counts from the first time in QUEUED, so a room that keeps giving its memory back ends, too.
        receiver.deadline = receiver.queued_at + self._limits.queue
        receiver.peer.send(RoomQueued(receiver.peer.epoch, receiver.handover))

    def take_memory(self, now: float) -> None:
        """Grant memory to the queued rooms in the order of claims, as far as it fits. They are PREALLOCATED from now
        on.
        """
        pinned = self._scheduler.memory.pinned
        granted = self._scheduler.planner.grant_incoming(now)
        queued = {receiver.req: receiver for receiver in self._rooms.in_state(ReceiverState.QUEUED)} if granted else {}
        for req in granted:
            receiver = queued[req]
            receiver.consumer.on_allocated(receiver)
            receiver.state, req.state = ReceiverState.PREALLOCATED, ReqState.PREALLOCATED
            receiver.allocated_at = now
            receiver.memory = ReceiverMemory(pinned.pin(req), pinned.fence())
            receiver.prefix_len = req.computed
            receiver.deadline = now + self._limits.landing

    def expect(self, receiver: KVReceiver, memory: ReceiverMemory) -> None:
        """Allocate window pages for a room with KV that is certain to come. Do nothing if that was done.

        The pages may have been in use more recently than the room's other pages, so the fence is taken anew.
        """
        if not memory.expects:
            memory.expects = True
            pinned = self._scheduler.memory.pinned
            pinned.expect(receiver.req, receiver.length, receiver.goes_on)
            memory.fence = pinned.fence()

    def ask_back(self, now: float) -> None:
        """Ask for memory of incoming requests back if other requests need it and no prefill uses it yet.

        If the prefill does not know the pages, they are freed at once. Otherwise it is sent ``Withdraw`` and may
        refuse. ``on_withdrawn`` takes its answer.
        """
        for req in self._claims.to_revoke(now):
            receiver = self._rooms.of(req)
            if receiver is None or receiver.memory is None:
                continue
            if receiver.state is ReceiverState.PREALLOCATED:  # the prefill does not know its pages
                self._store_first.start_over(receiver)
                self._queue_again(receiver, receiver.memory, now)
            elif receiver.state is ReceiverState.TRANSFERRING and receiver.peer.readable:
                receiver.peer.send(Withdraw(receiver.peer.epoch, receiver.handover))

    def on_withdrawn(self, peer: Peer, msg: Withdrawn, now: float) -> None:
        """Free the room's memory and queue it again if its prefill has agreed. The prefill waits for another request.

        If the prefill has begun, the room keeps its memory.
        """
        receiver = self._rooms.known(peer, msg.handover)
        if receiver is None or receiver.memory is None or receiver.state is not ReceiverState.TRANSFERRING:
            return
        req = receiver.req
        if not receiver.awaits_first_token or not self._claims.is_asked_back(req.rid):
            return
        if msg.begun:
            self._claims.began(req.rid)
            return
        self._rooms.revoke(receiver)
        # The store was read and the placement was decided before, so neither is done again.
        receiver.store, receiver.decided = StoreStage.OVER, True
        receiver.handover = self._rooms.draw_id(receiver.handover.room)
        req.first_token_estimate = None
        # Since it was asked for, the request was in the prefill's queue.
        req.phases.credit(math.inf, 0.0, 0.0, now)
        req.phases.enter(Phase.QUEUE, now)
        self._queue_again(receiver, receiver.memory, now)

    def _queue_again(self, receiver: KVReceiver, memory: ReceiverMemory, now: float) -> None:
        """Free the memory of a room that no prefill may write to, and queue its claim again."""
        req = receiver.req
        self._scheduler.memory.finish(req)
        self._scheduler.memory.pinned.unpin(memory.hold)
        receiver.memory, receiver.pages, receiver.progress, req.computed = None, [], 0, 0
        req.state = ReqState.BOOTSTRAPPING
        self.withdrawn += 1
        self._enter(receiver, now)
        self._claims.revoked(req)
