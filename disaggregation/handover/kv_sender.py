"""One room of the prefill's side: a request whose KV goes to another instance."""

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
from ...scheduler.estimates.first_token import NOTHING, Load
from ...scheduler.req import Req
from .peer import Peer


class SenderState(Enum):
    """Where a room stands.

    BOOTSTRAPPING: the client's request or the decode's is missing. AHEAD: the decode's is, and the prompt is computed
    meanwhile. QUEUED: for its turn to be computed. PUSHING: from the first computed piece of the prompt on. DRAINING:
    it failed, and the worker may still read or write for it.
    """

    BOOTSTRAPPING = auto()
    AHEAD = auto()
    QUEUED = auto()
    PUSHING = auto()
    DRAINING = auto()


@dataclass(slots=True)
class KVSender:
    """One room. ``run``: which of the prompt's pages were asked for, by group; ``next_page``: the first that is not
    pushed; ``computed``: all of them are, and the peer was told what follows. ``first``: what follows a prompt that is
    done and that nobody has asked for. ``asks``: the decode waits for a forecast, which it gets once. ``looked``: the
    store was asked what it has, for that. ``withdrawn``: the decode took back what it had asked for, and
    will ask again by a later attempt. ``foretold``: what it may still want, since it got it. ``failure`` says why the
    room drains. ``looks``: the last of those at its pages, once it is to be told what they held.

    ``hold``: the request's memory, pinned from its first push to the worker's ``SendEnded``. ``landed``: bytes, as far
    as the worker has told. ``told_at``: when the peer
    heard of progress last, or asked for the KV.
    """

    room: int
    since: float
    deadline: float
    state: SenderState = SenderState.BOOTSTRAPPING
    req: Req | None = None
    peer: Peer | None = None
    handover: HandoverId | None = None
    request: TransferRequest | None = None
    run: PageRun | None = None
    next_page: int = 0
    hold: KVHold | None = None
    computed: bool = False
    first: tuple[int, TokenLogprob | None] | None = None
    asks: bool | None = None
    looked: bool = False
    withdrawn: bool = False
    foretold: Load = NOTHING
    sent: SendEnded | None = None
    failure: tuple[int, str] | None = None
    abort_asked: bool = False
    looks: int | None = None
    landed: int = 0
    told_at: float = 0.0


def landed_pages(layout: KVLayout, run: PageRun, nbytes: int) -> int:
    """Return about how many of the pages of ``run``, of all groups, have landed with ``nbytes`` bytes."""
    total = sum(count * group.page_bytes for count, group in zip(run.counts, layout.groups, strict=True))
    return sum(run.counts) * nbytes // max(1, total)


def timeline_of(req: Req, sent: SendEnded | None, begun: float) -> Timeline:
    """Since both ends were there; without what is ``sent`` yet."""
    points = (req.times.admitted, req.times.first_token, *((sent.began, sent.ended) if sent else (begun, begun)))
    queue, prefill, first, last = (max(0.0, (when - begun) * 1000) for when in points)
    return Timeline(queue=queue, prefill=prefill, first_byte=first, last_byte=last)


def timing_for_decode(req: Req, sent: SendEnded | None, now: float) -> Timing:
    """Return where the time went here. The decode counts its own waiting, so the queue begins when it has asked."""
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
    """xxh3_64 of its first token ids: do both instances mean the same request?"""
    return xxhash.xxh3_64_intdigest(req.token_ids[:length].tobytes())
