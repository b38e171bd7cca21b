"""A hand-over on the decode instance: a request with KV that comes from another instance."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from ...mem_cache.base_prefix_cache import KVHold
from ...messages.base import I32, HandoverId, unpack_i32
from ...messages.handover import FirstToken
from ...messages.outputs import Timeline, Timing, TokenLogprob
from ...messages.worker import PagesByGroup
from ...scheduler.memory_terms import NO_FENCE, Fence
from ...scheduler.req import Req
from .limits import HandoverLimits
from .peer import Peer

ROUNDING = 0.5
"""Upper bound of a valid logprob. Rounding can put one slightly above 0."""


class Newcomer(Protocol):
    """Callbacks for the KV of a request that ran elsewhere.

    The request has output already, so no first token comes.
    """

    def landed(self, req: Req) -> None:
        """Continue the request: its KV has arrived and is verified."""

    def lost(self, req: Req, reason: str) -> None:
        """Give the request up: its KV will not come, for ``reason``."""


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
class KVReceiver:
    """State of one hand-over, from the decode's request for the KV to its arrival or failure."""

    handover: HandoverId
    req: Req
    peer: Peer
    state: ReceiverState
    since: float
    deadline: float
    length: int
    """Tokens with KV that is to come: the prompt's, or those that a ``newcomer`` had when it was offered."""
    newcomer: Newcomer | None = None
    """Callbacks of a migrated request or of returned KV; None for a request with a prefill."""
    queued_at: float = 0.0
    """Time at which it first became QUEUED."""
    allocated_at: float = 0.0
    """Time at which it last became PREALLOCATED."""
    fence: Fence = NO_FENCE
    """Steps that must be complete before its pages are offered to the prefill."""
    prefix_len: int = 0
    """Tokens that are cached here, so that their KV need not come. Set in PREALLOCATED."""
    requested_at: float = 0.0
    """Time at which the KV was asked for, in TRANSFERRING."""
    pages: PagesByGroup = field(default_factory=list)
    """Pages that receive the KV, by group. Set in TRANSFERRING."""
    expects: bool = False
    """Whether window pages are allocated for the KV, if the model has windowed layers."""
    draining_since: float = 0.0
    """Time at which it became DRAINING."""
    begun: bool = False
    """Whether the first token has arrived."""
    there: Timing | None = None
    """Breakdown of the prefill's time, from its ``TransferDone``."""
    granted: bool = False
    """Whether the prefill may write to ``pages``."""
    checking: bool = False
    """Whether the worker has the pages, to check them and perhaps to convert them."""
    store: StoreStage = StoreStage.NEW
    there_ms: float | None = None
    """The prefill's forecast in milliseconds. None if it has not come or was not asked for."""
    decided: bool = True
    """Whether it is settled which instance computes the prompt."""
    tried_again: bool = False
    """Whether the prefill was dialled a second time to report that the prompt is computed here."""
    hold: KVHold | None = None
    """The request's memory, pinned as long as the prefill or the worker may write to it."""
    hashes: bytes = b""
    """Hashes that the prefill reports for the contents of its pages."""
    progress: int = 0
    """Highest page count, computed plus landed, that the prefill has reported for this attempt."""

    @property
    def knows_what_to_ask(self) -> bool:
        """Whether two things are settled: the instance that computes the prompt, and what our own store supplies."""
        return self.decided and self.store is StoreStage.OVER

    @property
    def goes_on(self) -> int:
        """The first position that is computed here. The window pages that it reads have to come.

        For a prompt this is its last token: another answer to the same prompt begins in that token's page.
        """
        return self.length - 1 if self.newcomer is None else self.length

    def advances(self, pages: int, size: int) -> bool:
        """Record that ``pages`` pages are computed or landed, and return whether that is progress.

        The count is capped at what the hand-over has, so a peer cannot report progress for ever.
        """
        total = -(-self.length // size) + sum(len(numbers) // 4 for numbers in self.pages)
        before, self.progress = self.progress, max(self.progress, min(pages, total))
        return self.progress > before

    def whole_pages(self, size: int) -> tuple[int, I32]:
        """Return the index of the first received page within the request, and the full received pages.

        Only the first group's pages are returned.
        """
        first = self.prefix_len // size
        return first, unpack_i32(self.pages[0])[: self.length // size - first]

    def info(self, now: float) -> dict[str, Any]:
        """Return this room's entry for ``/transfers``."""
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


def is_sound(score: TokenLogprob, vocab_size: int) -> bool:
    """Return whether all token ids are in the vocabulary and all logprobs are numbers below ``ROUNDING``."""
    pairs = [(score.token_id, score.logprob), *score.top]
    return all(0 <= token < vocab_size and (p is None or p < ROUNDING) for token, p in pairs)


def first_token_problem(msg: FirstToken, req: Req, vocab_size: int) -> str | None:
    """Return why a prefill's first token or its logprobs are invalid, or None if they are valid."""
    if not 0 <= msg.token < vocab_size:
        return f"the prefill instance sent a first token that is none: {msg.token}"
    scores = msg.input_logprobs if req.wants_input_logprobs else None
    if scores is not None and len(scores) > req.prompt_len:
        return "the prefill instance sent more prompt logprobs than the prompt has tokens"
    logprob = msg.logprob if req.msg.logprobs is not None else None
    if not all(is_sound(score, vocab_size) for score in [*(scores or ()), *([logprob] if logprob else [])]):
        return "the prefill instance sent logprobs that are none"
    return None


def take_times(receiver: KVReceiver, there: Timing, now: float) -> None:
    """Record the prefill's timing (``there``) in the request: with the first token, and again when the KV is here."""
    times, timing = receiver.req.times, receiver.req.timing
    # Clocks of two hosts can't be compared, durations can. Time that neither side waited or computed is the hand-over.
    if receiver.there is None:
        receiver.req.phases.credit(there.queue_ms, there.prefill_ms, there.ahead_ms, now)
    timing.transfer_bytes = there.transfer_bytes
    verified = now if receiver.there is not None else times.arrival
    timing.timeline = timeline(receiver, there.timeline or Timeline(), verified)


def timeline(receiver: KVReceiver, there: Timeline, verified: float) -> Timeline:
    """Return the request's timeline: the steps here, then the prefill's own (``there``), in ms since the arrival here.

    ``verified`` is the time of the KV check, or the arrival time until the KV is checked.
    """
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


def too_late(receiver: KVReceiver, limits: HandoverLimits) -> str:
    """Return the error message for a client after its hand-over timed out: which step, and after how long."""
    where = receiver.req.msg.bootstrap
    if receiver.state is ReceiverState.LINKING:
        name = f"behind {where.host}:{where.port}" if where is not None else receiver.peer.epoch
        waited = f"{limits.bootstrap:.0f} s: {receiver.peer.reason or 'no answer'}"
        return f"the prefill instance {name} was not reached in {waited}"
    if receiver.state is ReceiverState.QUEUED:
        return f"{limits.queue:.0f} s were not enough for other requests to leave memory for the prompt"
    return f"the hand-over made no progress for {limits.landing:.0f} s"


def why(peer: Peer) -> str:
    """Return the error message for a client when the prefill instance is gone."""
    return f"the prefill instance can't be used: {peer.reason}"
