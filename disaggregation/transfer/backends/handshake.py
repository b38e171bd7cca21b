"""Handshake of a link: a writer's greeting to the owner of a pool, before any data.

The receiver's ``Offer`` reaches the writer through the control plane. The writer sends a ``Greeting``, and the receiver
answers with a ``GreetingAnswer``. Both are msgpack after a little-endian 32-bit length. The secret is random for each
start of an instance. It keeps out writers without the offer, and writers with the offer of an earlier start.
"""

from __future__ import annotations

import hmac
import struct
from typing import Annotated

import msgspec
from msgspec import Meta

from ....messages.decode import UndeclaredMessage, decode, shown
from ...errors import BadMetadata, LinkLost

WIRE_VERSION = 2
MAX_BODY = 4096
MAX_MEANS = 64 << 10
LENGTH = struct.Struct("<I")
EPOCH_CHARS = 128
MAX_GROUPS = 64


class OfferedGroup(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Shape of one of the peer's page groups; see ``PageGroup``."""

    num_pages: Annotated[int, Meta(ge=1, lt=1 << 31)]
    page_bytes: Annotated[int, Meta(ge=1, lt=1 << 40)]
    num_layers: Annotated[int, Meta(ge=1, lt=1 << 16)]


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of how to reach the pools of instance ``epoch``. ``place`` is an IP address or a name.

    ``streams``: pages are sent over the connection instead of being mapped. The offer comes over the network, so its
    fields are limited to what the system calls that use them accept.
    """

    backend: str
    epoch: Annotated[str, Meta(max_length=EPOCH_CHARS)]
    secret: Annotated[bytes, Meta(max_length=64)]
    groups: Annotated[list[OfferedGroup], Meta(min_length=1, max_length=MAX_GROUPS)]
    place: Annotated[str, Meta(max_length=64)]
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    host_id: str = ""
    streams: bool = False


class Greeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First message of the instance ``writer``, which wants to write to the pool of ``receiver``."""

    version: int
    writer: Annotated[str, Meta(max_length=EPOCH_CHARS)]
    receiver: Annotated[str, Meta(max_length=EPOCH_CHARS)]
    secret: Annotated[bytes, Meta(max_length=64)]


class GreetingAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The receiver's answer. ``error`` is "" or the reason for a refusal; ``means`` describes how to write."""

    error: str = ""
    means: Annotated[bytes, Meta(max_length=MAX_MEANS)] = b""


_OFFER = msgspec.msgpack.Decoder(Offer)
_GREETING = msgspec.msgpack.Decoder(Greeting)
_ANSWER = msgspec.msgpack.Decoder(GreetingAnswer)


def decode_offer(metadata: bytes, backend: str, peer: str) -> Offer:
    """Decode the offer of ``peer`` from its backend metadata.

    Raises ``BadMetadata`` if it is invalid, or of another backend or instance.
    """
    try:
        offer = decode(_OFFER, metadata, MAX_BODY)
    except UndeclaredMessage as e:
        raise BadMetadata(
            f"peer {peer} sent backend metadata that is not of the {backend} backend ({e}); "
            "start both instances with the same --disaggregation-transfer-backend and version"
        ) from e
    if offer.backend != backend:
        raise BadMetadata(
            f"peer {peer} uses the transfer backend {offer.backend}, this instance {backend}; "
            "start both with the same --disaggregation-transfer-backend"
        )
    if offer.epoch != peer:
        raise BadMetadata(f"the backend metadata for peer {peer} is that of {offer.epoch}: the peer has restarted")
    return offer


def judge(greeting: Greeting, epoch: str, secret: bytes) -> str:
    """Return why the pool owner ``epoch`` with this ``secret`` must refuse a greeting; "" if it may accept it."""
    if greeting.version != WIRE_VERSION:
        return f"it speaks version {greeting.version} of the transfer protocol, this instance {WIRE_VERSION}"
    if greeting.receiver != epoch:
        return f"it looks for {shown(greeting.receiver)}, which is an earlier life of this instance"
    if not hmac.compare_digest(greeting.secret, secret):
        return "its secret is wrong"
    if not greeting.writer:
        return "it does not say who it is"
    return ""


def frame(message: Greeting | GreetingAnswer) -> bytes:
    """Return the encoded ``message`` with its length in front, as it is sent."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def body_length(prefix: bytearray, most: int = MAX_BODY) -> int:
    """Decode the length of the body that follows. Raises ``LinkLost`` if it is 0 or more than ``most``."""
    length = int(LENGTH.unpack(prefix)[0])
    if not 0 < length <= most:
        raise LinkLost("the handshake is malformed")
    return length


def decode_greeting(body: bytearray) -> Greeting:
    """Decode a writer's greeting. Raises ``LinkLost`` for any other bytes."""
    try:
        return decode(_GREETING, body, MAX_BODY)
    except UndeclaredMessage as e:
        raise LinkLost(f"the greeting is malformed: {e}") from e


def decode_answer(body: bytearray) -> GreetingAnswer:
    """Decode the owner's answer to a greeting. Raises ``LinkLost`` for any other bytes."""
    try:
        return decode(_ANSWER, body, MAX_BODY + MAX_MEANS)
    except UndeclaredMessage as e:
        raise LinkLost(f"the answer to the greeting is malformed: {e}") from e
