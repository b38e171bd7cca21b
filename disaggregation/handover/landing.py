"""One room of the decode's side: a request whose KV comes from another instance."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from ...mem_cache.base_prefix_cache import KVHold
from ...messages.base import HandoverId
from ...messages.outputs import Timeline, Timing
from ...scheduler.req import Req
from .peer import Peer


class Newcomer(Protocol):
    """Who waits for the KV of a request that ran elsewhere. It has output already, so no first token comes."""

    def landed(self, req: Req) -> None:
        """The KV is here, and right."""

    def lost(self, req: Req, reason: str) -> None:
        """It won't come."""


class ReceiverState(Enum):
    """Where a room stands; see ``kv_receiver.py``."""

    LINKING = auto()
    QUEUED = auto()
    PREALLOCATED = auto()
    TRANSFERRING = auto()
    VERIFYING = auto()
    DRAINING = auto()
    DECLINED = auto()


@dataclass(slots=True, eq=False)
class KVReceiver:
    """One room.

    ``fence`` and ``copies_fence``: the step, and the copies between tiers, that must be done before its pages are
    offered to the prefill. ``pages``: where its KV lands
    (int32). ``granted``: the prefill may write them. ``begun``: the first token is here. ``there``: where the prefill's
    time went. ``checking``: the worker has its pages, to check and perhaps to convert them. ``asked``: the prefill
    for its forecast. ``decided``: who computes the prompt. ``tried_again``: to reach a prefill that is to be told of
    that. ``hold``: the request's memory, pinned as long as anybody may write it. ``length``: of how many tokens the KV
    comes: the prompt's, or those that a ``newcomer`` had when it was offered.
    """

    handover: HandoverId
    req: Req
    peer: Peer
    state: ReceiverState
    since: float
    deadline: float
    length: int
    newcomer: Newcomer | None = None
    queued_at: float = 0.0
    allocated_at: float = 0.0
    fence: int = 0
    copies_fence: int = 0
    prefix_len: int = 0
    requested_at: float = 0.0
    pages: bytes = b""
    draining_since: float = 0.0
    begun: bool = False
    there: Timing | None = None
    granted: bool = False
    checking: bool = False
    asked: bool = False
    decided: bool = True
    tried_again: bool = False
    hold: KVHold | None = None


def take_times(receiver: KVReceiver, there: Timing, now: float) -> None:
    """Where a request's time went, up to now; ``there``: on the prefill."""
    times, timing = receiver.req.times, receiver.req.timing
    total = (now - times.arrival) * 1000
    # Clocks of two hosts can't be compared, durations can: what neither side waited or computed was the hand-over.
    timing.queue_ms = (receiver.requested_at - times.arrival) * 1000 + there.queue_ms
    timing.prefill_ms = there.prefill_ms
    timing.transfer_ms = max(0.0, total - timing.queue_ms - timing.prefill_ms)
    timing.transfer_bytes = there.transfer_bytes
    verified = now if receiver.there is not None else times.arrival
    timing.timeline = timeline(receiver, there.timeline or Timeline(), verified)


def timeline(receiver: KVReceiver, there: Timeline, verified: float) -> Timeline:
    """What the prefill says ``there``, behind what came before it here. ``verified``: the arrival while it isn't."""
    arrival = receiver.req.times.arrival
    asked = (receiver.requested_at - arrival) * 1000
    pushed = there.last_byte > 0
    return Timeline(
        bootstrap=(receiver.queued_at - arrival) * 1000,
        allocate=(receiver.allocated_at - arrival) * 1000,
        queue=asked + max(0.0, there.queue),
        prefill=asked + max(0.0, there.prefill),
        first_byte=asked + max(0.0, there.first_byte) if pushed else 0.0,
        last_byte=asked + there.last_byte if pushed else 0.0,
        verify=(verified - arrival) * 1000,
    )


def why(peer: Peer) -> str:
    """For a client, what became of the prefill that was to serve it."""
    return f"the prefill instance can't be used: {peer.reason}"
