"""Control-plane messages between the schedulers of two instances (frames over TCP).

One connection joins a pair, whichever side dialled, and carries hand-overs in both directions. In each hand-over one
instance is the sender: it computes the prompt. The other is the receiver: it takes the KV, and its epoch is part of the
``HandoverId``.

Every message names the recipient's ``epoch``, as far as its author knows it. A message for an earlier start of a
process is dropped. Every message of a hand-over also has the ``HandoverId``.

Any program that reaches the port can send these messages. So every field is bounded to what an honest peer can mean.
Code after the decoder never meets a number that fits into no int64, or a name of a megabyte.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .base import MAX_TOKENS, Epoch, HandoverId, Message, Reason
from .outputs import CachedBeyond, Timing, TokenLogprob
from .worker import MAX_GROUPS, MAX_PAGES, KVLayout, SliceChecksum

PROTOCOL_VERSION = 18
MAX_METADATA_BYTES = 4096
MAX_DURATION_MS = 1e9
"""Maximum duration, eleven days. Durations are added up without end, and their sum has to stay meaningful."""
MAX_TRANSFER_BYTES = 1 << 40
"""Maximum bytes of one hand-over. Such counts are added up without end, and their sum has to fit into an int64."""

MAX_PHASES = 32
"""Maximum phases of a timing; larger than the number of phases times roles."""
DURATIONS = (
    *("tokenize_ms", "queue_ms", "prefill_ms", "transfer_ms", "decode_ms", "detokenize_ms"),
    *("first_token_ms", "push_ms", "ahead_ms"),
)

Metadata = Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
ErrorStatus = Annotated[int, Meta(ge=400, le=599)]
"""HTTP status of an error."""
Checksum = Annotated[int, Meta(ge=0)]
"""An xxh3_64 checksum; the wire format itself limits it to 64 bits."""
MAX_SLICES = 1 << 16
"""Maximum slices of one hand-over. With writes of 4 MiB or of a longer page, they hold 256 GiB or more."""
MAX_HASH_BYTES = 16 << 20
"""Maximum bytes of the hashes of one hand-over: 64 bits for each part of each layer of a page."""
PageNumbers = Annotated[bytes, Meta(max_length=4 * MAX_PAGES)]
PageNumbersByGroup = Annotated[list[PageNumbers], Meta(min_length=1, max_length=MAX_GROUPS)]


def check_timing(timing: Timing) -> None:
    """Raise ``ValueError`` for durations, byte counts or numbers of phases that no hand-over can have.

    Durations may be negative: the limits are plus and minus ``MAX_DURATION_MS``. Durations of phases and byte counts
    are at least 0.
    """
    durations = {name: getattr(timing, name) for name in DURATIONS}
    if timing.timeline is not None:
        durations |= msgspec.structs.asdict(timing.timeline)
    for name, duration in durations.items():
        # NaN fails this comparison as well.
        if not -MAX_DURATION_MS <= duration <= MAX_DURATION_MS:
            raise ValueError(f"{name} is no duration")
    if len(timing.phases) > MAX_PHASES or not all(0 <= one.ms <= MAX_DURATION_MS for one in timing.phases):
        raise ValueError("phases has what is no duration, or more of them than there are phases")
    if not 0 <= timing.transfer_bytes <= MAX_TRANSFER_BYTES:
        raise ValueError("transfer_bytes is no count of bytes")


class Hello(Message):
    """First message of a connection in both directions: the author introduces itself."""

    epoch: Epoch
    sender: Annotated[str, Meta(min_length=1, max_length=128)]
    """Epoch of this message's author, which is not always the sender of KV."""
    link: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    """Number that grows with each attempt of ``sender`` to reach ``epoch``; it is also that of the data link."""
    version: int
    fingerprint: Annotated[str, Meta(max_length=128)]
    layout: KVLayout
    backend: Annotated[str, Meta(max_length=32)]
    metadata: Metadata
    """Metadata of ``Invite``, which only instances know that ``sender`` has dialled or invited. The dialling side sends
    it to prove its epoch, because registrations hold its digest. The answering side leaves it out.
    """


class Invite(Message):
    """Receiver → sender: I am going to ask you for KV. My worker admits yours, so let it connect."""

    epoch: Epoch
    metadata: Metadata
    """How the transfer backend reaches the receiver's pool, the pool's secret included."""


class Welcome(Message):
    """Sender → receiver: my worker can write into your pool, so send your requests."""

    epoch: Epoch


class Refused(Message, omit_defaults=True):
    """Either way: the pair cannot exchange pages, for this reason.

    The usual status is left out, because an instance of another version must be able to read why it is refused.
    """

    epoch: Epoch
    reason: Reason
    status: ErrorStatus = 409
    """HTTP status of requests that need the pair: 409 if it can never exchange pages, 503 if it may do so later."""


class TransferRequest(Message):
    """Receiver → sender: send the KV of a hand-over to these pages."""

    epoch: Epoch
    handover: HandoverId
    prompt_len: Tokens
    prompt_digest: Checksum
    """Digest of the int32 prompt. It guards against a room that means another prompt at the sender."""
    decode_prefix_len: Tokens
    """First token to send (page-aligned); the receiver has the KV of those before it."""
    dst_pages: PageNumbersByGroup
    """Pages of the receiver for each group of the layout. A group with a window gets only the prompt's last pages,
    those that later tokens see.
    """
    checksum: bool = True
    """Whether the slices of ``TransferDone`` need checksums."""
    hashes: bool = False
    """Whether the receiver wants hashes of the pages as they were computed, if the sender has them (``--kv-debug``)."""

    def __post_init__(self) -> None:
        if any(len(pages) % 4 for pages in self.dst_pages):
            raise ValueError("dst_pages are not int32")
        if sum(map(len, self.dst_pages)) > 4 * MAX_PAGES:
            raise ValueError(f"dst_pages are more than {MAX_PAGES}")


class RoomQueued(Message):
    """Receiver → sender: this room is in my queue. I ask for it when I have memory, or give it up by my time limits.

    Keep it while I am connected. A sender keeps it for ``HandoverLimits.asking`` seconds at most.
    """

    epoch: Epoch
    handover: HandoverId


class ForecastRequest(Message):
    """Receiver → sender: I have memory for this room. How long would its prompt take? I may compute it myself."""

    epoch: Epoch
    handover: HandoverId


class Forecast(Message):
    """Sender → receiver: estimated time until the prompt is computed here. Sent once for a room."""

    epoch: Epoch
    handover: HandoverId
    ms: float
    """Milliseconds from now on, with the work that is computed before it."""

    def __post_init__(self) -> None:
        # NaN fails this comparison as well.
        if not 0 <= self.ms <= MAX_DURATION_MS:
            raise ValueError("ms is no duration")


class Declined(Message):
    """Receiver → sender: I compute the prompt myself, and never ask for KV of this room."""

    epoch: Epoch
    handover: HandoverId


class Progress(Message):
    """Sender → receiver: the hand-over makes progress, so keep waiting. Sent every few seconds of a long hand-over."""

    epoch: Epoch
    handover: HandoverId
    pages: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    """Computed whole pages of the prompt plus pages that have landed. Only growth extends the receiver's time limit."""


class FirstToken(Message):
    """Sender → receiver: the prompt is computed, and this token follows it.

    The KV may land later. The receiver sends the token to its client at once.
    """

    epoch: Epoch
    handover: HandoverId
    token: Tokens
    cached_tokens: Tokens
    timing: Timing
    """Where the sender has spent its time so far."""
    logprob: TokenLogprob | None = None
    input_logprobs: list[TokenLogprob] | None = None
    """Log-probabilities of the prompt; None unless the client asked for them."""
    cached_beyond: CachedBeyond | None = None
    """Part of ``cached_tokens`` that came from the sender's tiers."""

    def __post_init__(self) -> None:
        check_timing(self.timing)


class TransferDone(Message):
    """Sender → receiver: every page has landed; nothing more is written for this room. ``FirstToken`` came before."""

    epoch: Epoch
    handover: HandoverId
    slices: Annotated[list[SliceChecksum], Meta(max_length=MAX_SLICES)]
    """Everything that was written, with checksums if they were asked for."""
    timing: Timing
    """Where the sender has spent its time."""
    hashes: Annotated[bytes, Meta(max_length=MAX_HASH_BYTES)] = b""
    """Hashes of the whole pages that were asked for: page by page, and for each page by group, as in ``PagesHashed``.
    0 stands for an unknown hash. Empty if none is known, or none was asked for.
    """

    def __post_init__(self) -> None:
        check_timing(self.timing)


class TransferFailed(Message):
    """Sender → receiver: the hand-over has failed; nothing more is written for this room."""

    epoch: Epoch
    handover: HandoverId
    status: ErrorStatus
    reason: Reason


class Withdraw(Message):
    """Receiver → sender: another request needs the pages that I offered. Answered by ``Withdrawn``.

    If the sender has not started with the prompt, it drops the request. The receiver asks again in a later attempt.
    """

    epoch: Epoch
    handover: HandoverId


class Withdrawn(Message):
    """Sender → receiver: answer to ``Withdraw``."""

    epoch: Epoch
    handover: HandoverId
    begun: bool
    """True: the prompt is being computed, and its KV comes. False: nothing is ever written for this attempt."""


class Abort(Message):
    """Receiver → sender: stop the hand-over. Answered by ``AbortAck``, even if the room is unknown."""

    epoch: Epoch
    handover: HandoverId
    reason: Reason


class AbortAck(Message):
    """Sender → receiver: the hand-over has stopped; nothing more is written for this room."""

    epoch: Epoch
    handover: HandoverId


class Heartbeat(Message):
    """Either way: I am alive."""

    epoch: Epoch


ToSender = RoomQueued | ForecastRequest | TransferRequest | Withdraw | Abort | Declined
ToReceiver = Forecast | Progress | FirstToken | TransferDone | TransferFailed | Withdrawn | AbortAck
HandoverMessage = ToSender | ToReceiver
LinkMessage = Hello | Invite | Welcome | Refused | Heartbeat
