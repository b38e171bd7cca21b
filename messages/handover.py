"""Control-plane messages between the schedulers of two instances (frames over TCP).

One connection joins a pair, whoever of the two dialled, and carries hand-overs in both directions. In each hand-over
one is the sender (it computes the prompt) and one the receiver (it takes the KV, and names its own epoch in the
``HandoverId``). ``epoch`` is always that of whom the message is for, as far as its author knows: a message for an
earlier life of a process is dropped. Every message of a hand-over also names that.

These come over the network, from whoever reaches the port: every field is bounded to what an honest peer can mean, so
that nothing behind the decoder has to expect a number that fits into no int64, or a name of a megabyte.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .base import Epoch, HandoverId, Message, Reason
from .outputs import CachedBeyond, Timing, TokenLogprob
from .worker import MAX_GROUPS, MAX_PAGES, KVLayout, SliceChecksum

PROTOCOL_VERSION = 17
MAX_METADATA_BYTES = 4096
MAX_TOKENS = (1 << 31) - 1
MAX_DURATION_MS = 1e9
"""Eleven days: what is added up for ever stays a number that means something."""
MAX_TRANSFER_BYTES = 1 << 40
"""Of one hand-over. Such counts are added up for ever, and their sum has to stay within an int64 too."""

MAX_PHASES = 32
"""More than there are phases times roles."""
DURATIONS = (
    *("tokenize_ms", "queue_ms", "prefill_ms", "transfer_ms", "decode_ms", "detokenize_ms"),
    *("first_token_ms", "push_ms", "ahead_ms"),
)

Metadata = Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Checksum = Annotated[int, Meta(ge=0)]
"""xxh3_64; the wire format ends at 64 bits by itself."""
MAX_SLICES = 1 << 16
"""Of one hand-over: as many writes of 4 MiB, or of a longer page, are 256 GiB."""
MAX_HASH_BYTES = 16 << 20
"""Of one hand-over: 64 bits for each part of each layer of a page."""
PageNumbers = Annotated[bytes, Meta(max_length=4 * MAX_PAGES)]
PageNumbersByGroup = Annotated[list[PageNumbers], Meta(min_length=1, max_length=MAX_GROUPS)]


def check_timing(timing: Timing) -> None:
    """Raise ``ValueError`` for durations, and bytes, that can't be a hand-over's."""
    durations = {name: getattr(timing, name) for name in DURATIONS}
    if timing.timeline is not None:
        durations |= msgspec.structs.asdict(timing.timeline)
    for name, duration in durations.items():
        # What is no number is not within either.
        if not -MAX_DURATION_MS <= duration <= MAX_DURATION_MS:
            raise ValueError(f"{name} is no duration")
    if len(timing.phases) > MAX_PHASES or not all(0 <= one.ms <= MAX_DURATION_MS for one in timing.phases):
        raise ValueError("phases has what is no duration, or more of them than there are phases")
    if not 0 <= timing.transfer_bytes <= MAX_TRANSFER_BYTES:
        raise ValueError("transfer_bytes is no count of bytes")


class Hello(Message):
    """Both ways, first: who I am. ``sender`` is its author's epoch; ``link`` grows with each try of that epoch to reach
    this one.

    ``metadata`` is that of ``Invite``, which only those learn whom an instance has chosen to dial or invite. Who dials
    shows it to prove its epoch: registrations hold its digest. Who answers leaves it out.
    """

    epoch: Epoch
    sender: Annotated[str, Meta(min_length=1, max_length=128)]
    link: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    version: int
    fingerprint: Annotated[str, Meta(max_length=128)]
    layout: KVLayout
    backend: Annotated[str, Meta(max_length=32)]
    metadata: Metadata


class Invite(Message):
    """Receiver → sender: I shall ask you for KV; my worker lets yours in, so let it connect.

    ``metadata``: how the transfer backend reaches my pool, the pool's secret included.
    """

    epoch: Epoch
    metadata: Metadata


class Welcome(Message):
    """Sender → receiver: my worker can write into your pool. Ask."""

    epoch: Epoch


class Refused(Message):
    """Either way: the pair can't exchange pages, and why."""

    epoch: Epoch
    reason: Reason


class TransferRequest(Message):
    """Receiver → sender: send the KV of a hand-over from token ``decode_prefix_len`` on (page-aligned) to
    ``dst_pages``, of each group of the layout. Of a group whose pages go back behind a window these are the prompt's
    last ones, as far as whoever goes on sees.

    ``prompt_digest`` (xxh3_64 of the int32 prompt) guards against a room that means another prompt there. ``checksum``:
    whether the slices of ``TransferDone`` shall have theirs. ``hashes``: it compares what each page held when it was
    computed, if the sender knows (``--kv-debug``).
    """

    epoch: Epoch
    handover: HandoverId
    prompt_len: Tokens
    prompt_digest: Checksum
    decode_prefix_len: Tokens
    dst_pages: PageNumbersByGroup
    checksum: bool = True
    hashes: bool = False

    def __post_init__(self) -> None:
        if any(len(pages) % 4 for pages in self.dst_pages):
            raise ValueError("dst_pages are not int32")
        if sum(map(len, self.dst_pages)) > 4 * MAX_PAGES:
            raise ValueError(f"dst_pages are more than {MAX_PAGES}")


class RoomQueued(Message):
    """Receiver → sender: I know of this room and ask for it when I have memory; don't give up on it while I live."""

    epoch: Epoch
    handover: HandoverId


class ForecastRequest(Message):
    """Receiver → sender: I have memory for this room. How long would it take? I may compute the prompt myself."""

    epoch: Epoch
    handover: HandoverId


class Forecast(Message):
    """Sender → receiver: so long the prompt would take here from now on, behind what is to be computed before it.

    Given once for a room.
    """

    epoch: Epoch
    handover: HandoverId
    ms: float

    def __post_init__(self) -> None:
        # What is no number is not within either.
        if not 0 <= self.ms <= MAX_DURATION_MS:
            raise ValueError("ms is no duration")


class Declined(Message):
    """Receiver → sender: I compute the prompt myself; nothing was asked for in this room, nor will be."""

    epoch: Epoch
    handover: HandoverId


class Progress(Message):
    """Sender → receiver: more of the prompt was computed, or more of its KV has landed. Wait on.

    Told every few seconds of a hand-over that takes longer. ``pages``: whole pages of the prompt that are computed, and
    pages that have landed, added up. Unless it has grown, the receiver waits no longer than it would have anyway.
    """

    epoch: Epoch
    handover: HandoverId
    pages: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class FirstToken(Message):
    """Sender → receiver: the prompt is computed, and this is what follows it; its KV lands when it does.

    The receiver's client need not wait for the KV. ``timing``: where the time went there, so far. ``input_logprobs``:
    those of the prompt, where they were asked for. ``cached_beyond``: of the cached tokens.
    """

    epoch: Epoch
    handover: HandoverId
    token: Tokens
    cached_tokens: Tokens
    timing: Timing
    logprob: TokenLogprob | None = None
    input_logprobs: list[TokenLogprob] | None = None
    cached_beyond: CachedBeyond | None = None

    def __post_init__(self) -> None:
        check_timing(self.timing)


class TransferDone(Message):
    """Sender → receiver: every page has landed; nothing more will be written for this room. ``FirstToken`` came before.

    ``slices``: what was written, with checksums where they were asked for. ``timing``: where the time went there.
    ``hashes``: what the whole pages of the tokens that were asked for held, one after another, of each its groups, as
    in ``PagesHashed``; 0: not known. b"": nothing is, or it was not asked for.
    """

    epoch: Epoch
    handover: HandoverId
    slices: Annotated[list[SliceChecksum], Meta(max_length=MAX_SLICES)]
    timing: Timing
    hashes: Annotated[bytes, Meta(max_length=MAX_HASH_BYTES)] = b""

    def __post_init__(self) -> None:
        check_timing(self.timing)


class TransferFailed(Message):
    """Sender → receiver: the hand-over is off; nothing more will be written for this room."""

    epoch: Epoch
    handover: HandoverId
    status: Annotated[int, Meta(ge=400, le=599)]
    reason: Reason


class Withdraw(Message):
    """Receiver → sender: the pages that I offered are needed for another request. If you have not begun with the
    prompt, don't; I shall ask again, by a later attempt. Answered by ``Withdrawn``.
    """

    epoch: Epoch
    handover: HandoverId


class Withdrawn(Message):
    """Sender → receiver: nothing was, or will be, written for this attempt. Or, if ``begun``, the prompt is being
    computed, and the KV comes.
    """

    epoch: Epoch
    handover: HandoverId
    begun: bool


class Abort(Message):
    """Receiver → sender: stop the hand-over. Answered by ``AbortAck``, also for a room that is not known."""

    epoch: Epoch
    handover: HandoverId
    reason: Reason


class AbortAck(Message):
    """Sender → receiver: nothing more will be written for this room."""

    epoch: Epoch
    handover: HandoverId


class Heartbeat(Message):
    """Either way: I am alive."""

    epoch: Epoch


ToSender = RoomQueued | ForecastRequest | TransferRequest | Withdraw | Abort | Declined
ToReceiver = Forecast | Progress | FirstToken | TransferDone | TransferFailed | Withdrawn | AbortAck
HandoverMessage = ToSender | ToReceiver
LinkMessage = Hello | Invite | Welcome | Refused | Heartbeat
