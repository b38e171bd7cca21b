"""Control-plane messages between a decode's and a prefill's scheduler (ZMQ over TCP).

The decode connects; the prefill listens. ``epoch`` is always the *receiver's* epoch as the sender knows it: a message
for an earlier life of a process is dropped. Every message of a hand-over also names its room.
"""

from __future__ import annotations

import msgspec

from .base import Message
from .outputs import Timing, TokenLogprob
from .worker import KVLayout

PROTOCOL_VERSION = 2


class Hello(Message):
    """Decode → prefill: who I am. ``sender`` is the decode's epoch."""

    epoch: str
    sender: str
    version: int
    fingerprint: str
    layout: KVLayout
    backend: str
    metadata: bytes


class Welcome(Message):
    """Prefill → decode: the pair can exchange pages; the prefill's worker is connected to the decode's."""

    epoch: str


class Refused(Message):
    """Prefill → decode: the pair can't exchange pages, and why."""

    epoch: str
    reason: str


class TransferRequest(Message):
    """Decode → prefill: send the KV of room ``room`` from token ``decode_prefix_len`` on (page-aligned) to
    ``dst_pages``.

    ``prompt_digest`` (xxh3_64 of the int32 prompt) guards against a room that means another prompt there.
    """

    epoch: str
    room: int
    prompt_len: int
    prompt_digest: int
    decode_prefix_len: int
    dst_pages: bytes


class RoomQueued(Message):
    """Decode → prefill: I know of this room and ask for it when I have memory; don't give up on it while I live."""

    epoch: str
    room: int


class AuxData(msgspec.Struct, forbid_unknown_fields=True):
    """What travels beside the KV."""

    first_token: int
    cached_tokens: int
    timing: Timing
    first_logprob: TokenLogprob | None = None
    input_logprobs: list[TokenLogprob] | None = None


class TransferDone(Message):
    """Prefill → decode: every page has landed; nothing more will be written for this room."""

    epoch: str
    room: int
    checksum: int
    aux: AuxData


class TransferFailed(Message):
    """Prefill → decode: the hand-over is off; nothing more will be written for this room."""

    epoch: str
    room: int
    status: int
    reason: str


class Abort(Message):
    """Decode → prefill: stop the hand-over. Answered by ``AbortAck``, also for a room that is not known."""

    epoch: str
    room: int
    reason: str


class AbortAck(Message):
    """Prefill → decode: nothing more will be written for this room."""

    epoch: str
    room: int


class Heartbeat(Message):
    """Either way: I am alive."""

    epoch: str


DecodeToPrefill = Hello | RoomQueued | TransferRequest | Abort | Heartbeat
PrefillToDecode = Welcome | Refused | TransferDone | TransferFailed | AbortAck | Heartbeat
