"""One room of the decode's side: a request whose KV comes from another instance."""

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
"""A logprob may be above 0 by less."""


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


class StoreStage(Enum):
    """What becomes of a room's pages in the store; see ``store_first.py``."""

    NEW = auto()
    LOOKING = auto()
    FETCHING = auto()
    OVER = auto()


@dataclass(slots=True, eq=False)
class KVReceiver:
    """One room.

    ``fence``: what must be done before its pages are offered to the prefill. ``expects``: it has window pages for what
    comes, if there are any. ``pages``: where its KV lands, by group. ``granted``: the prefill may write them.
    ``begun``: the first token is here. ``there``: where the prefill's time went. ``checking``: the worker has its
    pages, to check and perhaps to convert them. ``there_ms``: the prefill's forecast, None where it has not come, or
    was not asked for. ``decided``: who computes the prompt. ``tried_again``: to reach a prefill that is to be told of
    that. ``hold``: the request's memory, pinned as long as anybody may write it. ``length``: of how many tokens the KV
    comes: the prompt's, or those that a ``newcomer`` had when it was offered. ``hashes``: what the prefill says that
    its pages held. ``progress``: the most pages that it has told of, computed and landed, for this attempt.
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
    fence: Fence = NO_FENCE
    prefix_len: int = 0
    requested_at: float = 0.0
    pages: PagesByGroup = field(default_factory=list)
    expects: bool = False
    draining_since: float = 0.0
    begun: bool = False
    there: Timing | None = None
    granted: bool = False
    checking: bool = False
    store: StoreStage = StoreStage.NEW
    there_ms: float | None = None
    decided: bool = True
    tried_again: bool = False
    hold: KVHold | None = None
    hashes: bytes = b""
    progress: int = 0

    @property
    def knows_what_to_ask(self) -> bool:
        """Whether the prefill is to compute the prompt, and how much of it our own store gives."""
        return self.decided and self.store is StoreStage.OVER

    @property
    def goes_on(self) -> int:
        """From which position on something is computed here: what it sees of windowed layers has to come. Another
        answer to the same prompt begins in the page of the prompt's last token.
        """
        return self.length - 1 if self.newcomer is None else self.length

    def advances(self, pages: int, size: int) -> bool:
        """Note that so many pages are computed and landed. Return whether that is progress, which comes to an end."""
        total = -(-self.length // size) + sum(len(numbers) // 4 for numbers in self.pages)
        before, self.progress = self.progress, max(self.progress, min(pages, total))
        return self.progress > before

    def whole_pages(self, size: int) -> tuple[int, I32]:
        """Of what came, the pages of the first group that are full, and which of the request's is the first of them."""
        first = self.prefix_len // size
        return first, unpack_i32(self.pages[0])[: self.length // size - first]

    def info(self, now: float) -> dict[str, Any]:
        """For /transfers."""
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
    """Whether it is of tokens that there are, and a number; a little above 0 is rounding."""
    pairs = [(score.token_id, score.logprob), *score.top]
    return all(0 <= token < vocab_size and (p is None or p < ROUNDING) for token, p in pairs)


def first_token_problem(msg: FirstToken, req: Req, vocab_size: int) -> str | None:
    """Why what a prefill sent ahead of the KV can't be meant, None where it can."""
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
    """Note where a request's time went on the prefill (``there``): with the first token, and again when KV is here."""
    times, timing = receiver.req.times, receiver.req.timing
    # Clocks of two hosts can't be compared, durations can: what neither side waited or computed was the hand-over.
    if receiver.there is None:
        receiver.req.phases.credit(there.queue_ms, there.prefill_ms, there.ahead_ms, now)
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


def too_late(receiver: KVReceiver, limits: HandoverLimits) -> str:
    """Return the error message for a client whose hand-over timed out: which step, and after how long."""
    where = receiver.req.msg.bootstrap
    if receiver.state is ReceiverState.LINKING:
        name = f"behind {where.host}:{where.port}" if where is not None else receiver.peer.epoch
        waited = f"{limits.bootstrap:.0f} s: {receiver.peer.reason or 'no answer'}"
        return f"the prefill instance {name} was not reached in {waited}"
    if receiver.state is ReceiverState.QUEUED:
        return f"{limits.queue:.0f} s were not enough for other requests to leave memory for the prompt"
    return f"the hand-over made no progress for {limits.landing:.0f} s"


def why(peer: Peer) -> str:
    """For a client, what became of the prefill that was to serve it."""
    return f"the prefill instance can't be used: {peer.reason}"
