"""A hand-over on the prefill instance: a request with KV that goes to another instance."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import xxhash

from ...mem_cache.base_prefix_cache import KVHold
from ...mem_cache.page_run import PageRun
from ...messages.base import HandoverId
from ...messages.handover import TransferRequest
from ...messages.outputs import Phase, Timeline, Timing, TokenLogprob
from ...messages.worker import KVLayout, SendEnded
from ...scheduler.first_token import NOTHING, Load
from ...scheduler.req import Req
from .failure import Failure
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


class FirstOutput(NamedTuple):
    """Output of a finished prompt that no decode has asked for yet."""

    req: Req
    token: int
    logprob: TokenLogprob | None


@dataclass(slots=True, eq=False)
class DecodeSide:
    """The decode's attempt that a room belongs to, from the decode's first message on."""

    peer: Peer
    handover: HandoverId


@dataclass(slots=True, eq=False)
class PromptTransfer:
    """The transfer of a prompt's KV, from the time at which both requests are here (QUEUED)."""

    req: Req
    decode: DecodeSide
    transfer_request: TransferRequest
    run: PageRun
    """Pages of the prompt that the decode asked for, by group."""
    next_page: int
    """First page that is not pushed yet."""
    reported_at: float
    """Time at which the peer last got a progress report, or asked for the KV."""
    hold: KVHold | None = None
    """The request's memory, pinned from its first push to the worker's ``SendEnded``."""
    computed: bool = False
    """Whether the whole prompt is computed and the first token is sent to the peer."""
    landed: int = 0
    """Bytes that have landed, as last reported by the worker."""
    sent: SendEnded | None = None
    looks: int | None = None
    """Number of the newest KV debug question when the transfer was complete. Page hashes are sent after its answer."""


@dataclass(slots=True)
class KVSender:
    """State of one hand-over, from the first of its two requests to its end."""

    room: int
    since: float
    deadline: float
    state: SenderState = SenderState.BOOTSTRAPPING
    req: Req | None = None
    """The client's request."""
    decode: DecodeSide | None = None
    transfer_request: TransferRequest | None = None
    """The decode's request for the KV."""
    transfer: PromptTransfer | None = None
    """The transfer. Set from QUEUED on."""
    first: FirstOutput | None = None
    """Output of the finished prompt. Set in AHEAD."""
    asks: bool | None = None
    """Whether the decode waits for a forecast, which it gets once. None before it asks."""
    looked: bool = False
    """Whether the store was asked, for the forecast, which pages it has."""
    withdrawn: bool = False
    """Whether the decode withdrew its request. It will ask again with a later attempt."""
    expected_load: Load = NOTHING
    """Load that the decode may still bring, since it got a forecast."""
    failure: Failure | None = None
    """Why the hand-over failed. Set in DRAINING."""
    abort_asked: bool = False
    """Whether the peer aborted the hand-over and waits for an ``AbortAck``."""

    @property
    def peer(self) -> Peer | None:
        """The decode's instance. None before the decode's first message."""
        return self.decode.peer if self.decode is not None else None

    @property
    def handover(self) -> HandoverId | None:
        """Id of the decode's attempt. None before the decode's first message."""
        return self.decode.handover if self.decode is not None else None

    @property
    def computed(self) -> bool:
        """Whether the whole prompt is computed and the first token is sent to the peer."""
        return self.transfer is not None and self.transfer.computed

    def is_of_another(self, handover: HandoverId) -> bool:
        """Return whether the room belongs to another attempt, of the same decode or of another one, than ``handover``.

        Return False for a room that no decode has asked for.
        """
        return self.decode is not None and self.decode.handover != handover

    def assign(self, peer: Peer, handover: HandoverId) -> None:
        """Assign the room to the decode's attempt ``handover`` if it belongs to none, and record that ``peer`` speaks
        for it.
        """
        if self.decode is None:
            self.decode = DecodeSide(peer, handover)
        self.decode.peer = peer

    def info(self, now: float) -> dict[str, Any]:
        """Return this hand-over's entry for ``/transfers``, JSON-ready."""
        return {
            "direction": "sending",
            "room": self.room,
            "state": self.state.name.lower(),
            "rid": self.req.rid if self.req is not None else None,
            "peer": self.decode.peer.epoch if self.decode is not None else None,
            "seconds": round(now - self.since, 3),
            "prompt_tokens": self.req.prompt_len if self.req is not None else None,
            "reason": self.failure.reason if self.failure is not None else None,
        }


def mismatch(req: Req, request: TransferRequest, run: PageRun, page_size: int) -> str | None:
    """Return why the decode's request for the KV does not fit the client's request here, or None if it does.

    ``run``: the pages that this instance would send, by group. The decode must offer as many in each group.
    """
    if request.prompt_len != req.prompt_len or request.prompt_digest != digest_of(req, req.prompt_len):
        return f"bootstrap_room {request.handover.room} means another prompt on the decode instance"
    offered = [len(pages) // 4 for pages in request.dst_pages]
    bad_prefix = request.decode_prefix_len % page_size or not 0 <= request.decode_prefix_len <= req.prompt_len
    if bad_prefix or offered != run.counts:
        return f"the decode instance offers {_counts_text(offered)} pages where {_counts_text(run.counts)} are needed"
    return None


def _counts_text(counts: list[int]) -> str:
    """Format the page counts of all groups for a log line or an error message."""
    return " and ".join(map(str, counts))


def delivered_pages(layout: KVLayout, run: PageRun, nbytes: int) -> int:
    """Estimate how many of the pages of ``run``, of all groups, have arrived if ``nbytes`` bytes have."""
    total = sum(count * group.page_bytes for count, group in zip(run.counts, layout.groups, strict=True))
    return sum(run.counts) * nbytes // max(1, total)


def timeline_of(req: Req, sent: SendEnded | None, begun: float) -> Timeline:
    """Return the prefill's part of the hand-over's timeline, in milliseconds since ``begun``.

    ``begun``: ``time.monotonic()`` when both the client's and the decode's request were here. Earlier points count as
    0. ``sent``: the finished transfer; None before, and the times of the transfer are then 0.
    """
    points = (req.times.admitted, req.times.first_token, *((sent.began, sent.ended) if sent else (begun, begun)))
    queue, prefill, first, last = (max(0.0, (when - begun) * 1000) for when in points)
    return Timeline(queue=queue, prefill=prefill, first_byte=first, last_byte=last)


def timing_for_decode(req: Req, sent: SendEnded | None, now: float) -> Timing:
    """Return where this instance has spent its time on the request, in milliseconds, for the decode.

    The decode counts its own waiting, so queueing counts only from the time at which the decode asked for the KV.
    ``sent``: the finished transfer, None before.
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
