"""A hand-over on the decode instance: a request with KV that comes from another instance."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

from ...mem_cache.base_prefix_cache import KVHold
from ...messages.base import I32, HandoverId, unpack_i32
from ...messages.outputs import Timing
from ...messages.worker import PagesByGroup
from ...scheduler.memory_terms import Fence
from ...scheduler.req import Req
from .limits import HandoverLimits
from .peer import Peer


class KVConsumer(Protocol):
    """The use of KV that arrives: a prompt to be continued here, or a request that migrates here."""

    def on_allocated(self, receiver: KVReceiver) -> None:
        """Note that a hand-over has got memory for its KV. It may happen again, after it gave its memory back."""

    def landed(self, receiver: KVReceiver, there: Timing, now: float) -> None:
        """Continue the hand-over's request: its KV has arrived and is verified.

        ``there``: where the other instance has spent its time.
        """

    def lost(self, receiver: KVReceiver, status: int, reason: str, now: float) -> None:
        """Give the hand-over's request up, or compute its prompt here: its KV will not come, for ``reason``.

        ``status``: HTTP status of an error to the client.
        """


class ReceiverState(Enum):
    """State of a ``KVReceiver``; ``receiver_table.py`` draws the transitions."""

    LINKING = auto()
    QUEUED = auto()
    PREALLOCATED = auto()
    TRANSFERRING = auto()
    VERIFYING = auto()
    DRAINING = auto()
    DECLINED = auto()


class StoreStage(Enum):
    """Progress of fetching a room's pages from this instance's own store; see ``store_first.py``."""

    NEW = auto()
    LOOKING = auto()
    FETCHING = auto()
    OVER = auto()


@dataclass(slots=True, eq=False)
class ReceiverMemory:
    """Memory of a room, from PREALLOCATED until the room ends or gives it back."""

    hold: KVHold
    """The request's memory, pinned as long as the prefill or the worker may write to it."""
    fence: Fence
    """Steps that must be complete before its pages are offered to the prefill."""
    expects: bool = False
    """Whether window pages are allocated for the KV, if the model has windowed layers."""


class LandedCheck(NamedTuple):
    """What is needed when the worker has checked landed pages."""

    hold: KVHold
    there: Timing
    """Breakdown of the prefill's time, from its ``TransferDone``."""
    hashes: bytes
    """Hashes that the prefill reports for the contents of its pages."""


@dataclass(slots=True, eq=False)
class KVReceiver:
    """State of one hand-over, from the decode's request for the KV to its arrival or failure."""

    handover: HandoverId
    req: Req
    peer: Peer
    consumer: KVConsumer
    since: float
    deadline: float
    length: int
    """Tokens with KV that is to come: the prompt's, or those that a migrating request had when it was offered."""
    goes_on: int
    """The first position that is computed here. The window pages that it reads have to come."""
    awaits_first_token: bool
    """Whether the first token of a prompt has not arrived. False for a migrating request, which has output."""
    decided: bool
    """Whether it is settled which instance computes the prompt."""
    store: StoreStage
    is_optional: bool = False
    """Whether no request waits for the KV here: its claim on memory may be passed over."""
    state: ReceiverState = ReceiverState.LINKING
    queued_at: float = 0.0
    """Time at which it first became QUEUED."""
    allocated_at: float = 0.0
    """Time at which it last became PREALLOCATED."""
    memory: ReceiverMemory | None = None
    prefix_len: int = 0
    """Tokens that are cached here, so that their KV need not come. Set in PREALLOCATED."""
    requested_at: float = 0.0
    """Time at which the KV was asked for, in TRANSFERRING."""
    pages: PagesByGroup = field(default_factory=list)
    """Pages that receive the KV, by group. Set in TRANSFERRING."""
    draining_since: float = 0.0
    """Time at which it became DRAINING."""
    granted: bool = False
    """Whether the prefill may write to ``pages``."""
    check: LandedCheck | None = None
    """The check under way: the worker has the pages, and perhaps converts them."""
    there_ms: float | None = None
    """The prefill's forecast in milliseconds. None if it has not come or was not asked for."""
    tried_again: bool = False
    """Whether the prefill was dialled a second time to report that the prompt is computed here."""
    progress: int = 0
    """Highest page count, computed plus landed, that the prefill has reported for this attempt."""

    @property
    def knows_what_to_ask(self) -> bool:
        """Whether the prefill can be asked for the KV: it is to compute the prompt, and what our store supplies is
        known.
        """
        return self.decided and self.store is StoreStage.OVER

    def advances(self, pages: int, size: int) -> bool:
        """Record the prefill's report that ``pages`` pages are computed or landed, and return whether it is progress.

        ``size``: tokens of a page. The count is capped at what the hand-over has, so a peer cannot report progress for
        ever.
        """
        total = -(-self.length // size) + sum(len(numbers) // 4 for numbers in self.pages)
        before, self.progress = self.progress, max(self.progress, min(pages, total))
        return self.progress > before

    def whole_pages(self, size: int) -> tuple[int, I32]:
        """Return the index of the first received page within the request, and the received pages that are full.

        They are pages of the first group only. ``size``: tokens of a page.
        """
        first = self.prefix_len // size
        return first, unpack_i32(self.pages[0])[: self.length // size - first]

    def info(self, now: float) -> dict[str, Any]:
        """Return this hand-over's entry for ``/transfers``, JSON-ready."""
        return {
            "direction": "receiving",
            "room": self.handover.room,
            "state": self.state.name.lower(),
            "rid": self.req.rid,
            "peer": self.peer.epoch or None,
            "seconds": round(now - self.since, 3),
            "prompt_tokens": self.req.prompt_len,
            "reason": self.peer.reason or None,
        }


def too_late(receiver: KVReceiver, limits: HandoverLimits) -> str:
    """Return the client's error message for a hand-over that exceeded a time limit: what it waited for, how long."""
    where = receiver.req.msg.bootstrap
    if receiver.state is ReceiverState.LINKING:
        name = f"behind {where.host}:{where.port}" if where is not None else receiver.peer.epoch
        waited = f"{limits.bootstrap:.0f} s: {receiver.peer.reason or 'no answer'}"
        return f"the prefill instance {name} was not reached in {waited}"
    if receiver.state is ReceiverState.QUEUED:
        return f"{limits.queue:.0f} s were not enough for other requests to leave memory for the prompt"
    return f"the hand-over made no progress for {limits.landing:.0f} s"


def why(peer: Peer) -> str:
    """Return the client's error message for a hand-over with a prefill instance that is gone."""
    return f"the prefill instance can't be used: {peer.reason}"
