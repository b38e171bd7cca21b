"""A hand-over on the prefill instance: a request with KV that goes to another instance."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import xxhash

from ...mem_cache.base_prefix_cache import KVHold
from ...mem_cache.page_run import PageRun
from ...messages.base import HandoverId
from ...messages.handover import TransferRequest
from ...messages.outputs import Phase, Timeline, Timing, TokenLogprob
from ...messages.worker import KVLayout, SendEnded
from ...scheduler.first_token import NOTHING, Load
from ...scheduler.req import Req
from .peer import Peer


class SenderState(Enum):
    """State of a ``KVSender``."""

    BOOTSTRAPPING = auto()
    """The client's request or the decode's is missing."""
    AHEAD = auto()
    """The decode's request is missing, and the prompt is computed meanwhile."""
    QUEUED = auto()
    """Both requests are here, and the prompt waits to be computed."""
    PUSHING = auto()
    """The first chunk of the prompt is planned; pages are pushed as they are computed."""
    DRAINING = auto()
    """The hand-over failed, and the worker may still read or write for it."""


@dataclass(slots=True)
class KVSender:
    """State of one hand-over, from the first of its two requests to its end."""

    room: int
    since: float
    deadline: float
    state: SenderState = SenderState.BOOTSTRAPPING
    req: Req | None = None
    peer: Peer | None = None
    handover: HandoverId | None = None
    request: TransferRequest | None = None
    run: PageRun | None = None
    """Pages of the prompt that the decode asked for, by group."""
    next_page: int = 0
    """First page that is not pushed yet."""
    hold: KVHold | None = None
    """The request's memory, pinned from its first push to the worker's ``SendEnded``."""
    computed: bool = False
    """Whether the whole prompt is computed and the first token is sent to the peer."""
    first: tuple[int, TokenLogprob | None] | None = None
    """First token of a finished prompt that no decode has asked for yet. Set in AHEAD."""
    asks: bool | None = None
    """Whether the decode waits for a forecast, which it gets once. None before it asks."""
    looked: bool = False
    """Whether the store was asked, for the forecast, which pages it has."""
    withdrawn: bool = False
    """Whether the decode withdrew its request. It will ask again with a later attempt."""
    foretold: Load = NOTHING
    """Load that the decode may still bring, since it got a forecast."""
    sent: SendEnded | None = None
    failure: tuple[int, str] | None = None
    """HTTP status and reason of the failure. Set in DRAINING."""
    abort_asked: bool = False
    """Whether the peer aborted the hand-over and waits for an ``AbortAck``."""
    looks: int | None = None
    """Number of the newest KV debug question when the transfer was complete. Page hashes are sent after its answer."""
    landed: int = 0
    """Bytes that have landed, as last reported by the worker."""
    told_at: float = 0.0
    """Time at which the peer last got a progress report, or asked for the KV."""


def delivered_pages(layout: KVLayout, run: PageRun, nbytes: int) -> int:
    """Return about how many of the pages of ``run``, of all groups, have landed with ``nbytes`` bytes."""
    total = sum(count * group.page_bytes for count, group in zip(run.counts, layout.groups, strict=True))
    return sum(run.counts) * nbytes // max(1, total)


def timeline_of(req: Req, sent: SendEnded | None, begun: float) -> Timeline:
    """Return the timeline in milliseconds since ``begun``. Without ``sent``, the times of the transfer are 0."""
    points = (req.times.admitted, req.times.first_token, *((sent.began, sent.ended) if sent else (begun, begun)))
    queue, prefill, first, last = (max(0.0, (when - begun) * 1000) for when in points)
    return Timeline(queue=queue, prefill=prefill, first_byte=first, last_byte=last)


def timing_for_decode(req: Req, sent: SendEnded | None, now: float) -> Timing:
    """Return the breakdown of the time spent on this instance.

    The decode counts its own waiting, so queueing counts from the decode's request on.
    """
    begun, phases = max(req.times.arrival, req.times.ready), req.phases
    phases.upto(now)
    return Timing(
        queue_ms=phases.spent(Phase.QUEUE, phases.here) - phases.before_mark(Phase.QUEUE),
        prefill_ms=phases.spent(Phase.PREFILL),
        ahead_ms=phases.before_mark(Phase.PREFILL),
        transfer_bytes=req.timing.transfer_bytes,
        timeline=timeline_of(req, sent, begun),
    )


def digest_of(req: Req, length: int) -> int:
    """Return the xxh3_64 hash of a request's first ``length`` token ids.

    Two instances compare it to check that they mean the same request.
    """
    return xxhash.xxh3_64_intdigest(req.token_ids[:length].tobytes())
