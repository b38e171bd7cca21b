"""Control-plane messages between a decode's and a prefill's scheduler (frames over TCP).

The decode connects; the prefill listens. ``epoch`` is always the *receiver's* epoch as the sender knows it: a message
for an earlier life of a process is dropped. Every message of a hand-over also names that.

These come over the network, from whoever reaches the port: every field is bounded to what an honest peer can mean, so
that nothing behind the decoder has to expect a number that fits into no int64, or a name of a megabyte.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from .base import Epoch, HandoverId, Message, Reason
from .outputs import Timing, TokenLogprob
from .worker import KVLayout

PROTOCOL_VERSION = 3
MAX_METADATA_BYTES = 4096
MAX_TOKENS = (1 << 31) - 1
MAX_TRANSFER_BYTES = 1 << 40
"""Of one hand-over. Such counts are added up for ever, and their sum has to stay within an int64 too."""

Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Checksum = Annotated[int, Meta(ge=0)]
"""xxh3_64; the wire format ends at 64 bits by itself."""
MAX_PAGES = 1 << 18
"""That one ``TransferRequest`` can name."""
PageNumbers = Annotated[bytes, Meta(max_length=4 * MAX_PAGES)]


class Hello(Message):
    """Decode → prefill: who I am. ``sender`` is the decode's epoch."""

    epoch: Epoch
    sender: Annotated[str, Meta(min_length=1, max_length=128)]
    version: int
    fingerprint: Annotated[str, Meta(max_length=128)]
    layout: KVLayout
    backend: Annotated[str, Meta(max_length=32)]
    metadata: Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)]


class Welcome(Message):
    """Prefill → decode: the pair can exchange pages; the prefill's worker is connected to the decode's."""

    epoch: Epoch


class Refused(Message):
    """Prefill → decode: the pair can't exchange pages, and why."""

    epoch: Epoch
    reason: Reason


class TransferRequest(Message):
    """Decode → prefill: send the KV of a hand-over from token ``decode_prefix_len`` on (page-aligned) to
    ``dst_pages``.

    ``prompt_digest`` (xxh3_64 of the int32 prompt) guards against a room that means another prompt there.
    """

    epoch: Epoch
    handover: HandoverId
    prompt_len: Tokens
    prompt_digest: Checksum
    decode_prefix_len: Tokens
    dst_pages: PageNumbers

    def __post_init__(self) -> None:
        if len(self.dst_pages) % 4:
            raise ValueError("dst_pages are not int32")


class RoomQueued(Message):
    """Decode → prefill: I know of this room and ask for it when I have memory; don't give up on it while I live."""

    epoch: Epoch
    handover: HandoverId


class AuxData(msgspec.Struct, forbid_unknown_fields=True):
    """What travels beside the KV."""

    first_token: Tokens
    cached_tokens: Tokens
    timing: Timing
    first_logprob: TokenLogprob | None = None
    input_logprobs: list[TokenLogprob] | None = None

    def __post_init__(self) -> None:
        timing = self.timing
        for name in ("queue_ms", "prefill_ms", "transfer_ms", "decode_ms", "detokenize_ms"):
            if not math.isfinite(getattr(timing, name)):
                raise ValueError(f"{name} is no duration")
        if not 0 <= timing.transfer_bytes <= MAX_TRANSFER_BYTES:
            raise ValueError("transfer_bytes is no count of bytes")


class TransferDone(Message):
    """Prefill → decode: every page has landed; nothing more will be written for this room."""

    epoch: Epoch
    handover: HandoverId
    checksum: Checksum
    aux: AuxData


class TransferFailed(Message):
    """Prefill → decode: the hand-over is off; nothing more will be written for this room."""

    epoch: Epoch
    handover: HandoverId
    status: Annotated[int, Meta(ge=400, le=599)]
    reason: Reason


class Abort(Message):
    """Decode → prefill: stop the hand-over. Answered by ``AbortAck``, also for a room that is not known."""

    epoch: Epoch
    handover: HandoverId
    reason: Reason


class AbortAck(Message):
    """Prefill → decode: nothing more will be written for this room."""

    epoch: Epoch
    handover: HandoverId


class Heartbeat(Message):
    """Either way: I am alive."""

    epoch: Epoch


DecodeToPrefill = Hello | RoomQueued | TransferRequest | Abort | Heartbeat
PrefillToDecode = Welcome | Refused | TransferDone | TransferFailed | AbortAck | Heartbeat
