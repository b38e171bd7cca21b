"""What crosses a control connection, either way: a greeting, then frames.

    greeting: eight bytes that name the protocol, the version of this framing, a key of this connection (or zeros)
    frame: its length in bytes, then a msgpack list of messages, sealed where there is a cluster secret (``session.py``)

Numbers are little-endian, 32 bits. What the messages mean has a version of its own, in ``Hello``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ....messages.base import Message
from ....messages.channel import encode

FRAMING_VERSION = 2
GREETING = struct.Struct("<8sI")
KEY_BYTES = 32
NO_KEY = bytes(KEY_BYTES)
MAGIC = b"\x89pdserve"
"""Its first byte begins no text, no TLS and no ZMTP."""
LENGTH = struct.Struct("<I")

SHORT_FRAME_BYTES = (1 << 20) + 4096
"""Of one frame: the page numbers of the longest ``TransferRequest``, and what is around them."""
LONG_FRAME_BYTES = 17 << 20
"""Of one frame from a peer that is asked for KV: ``FirstToken`` brings the log-probabilities of a prompt.

2^20 of them, four times the default of ``--max-logprobs-per-request``, take 16 MiB. No more, because
what a hostile peer packs most densely takes 40 times as much memory when it is decoded, and 0.4 s for each MiB.
"""
FRAME_MESSAGES = 1024
MESSAGES_A_TURN = 2048


class Frames(NamedTuple):
    """Messages, encoded. ``too_long`` are those that no frame can take."""

    encoded: list[bytes]
    too_long: list[Message]


def make_frames(messages: Sequence[Message], limit: int) -> Frames:
    """As few frames as stay within ``limit`` bytes and ``FRAME_MESSAGES``: a receiver drops who sends longer ones."""
    if not messages:
        return Frames([], [])
    if len(messages) <= FRAME_MESSAGES:
        frame = encode(messages)
        if len(frame) <= limit:
            return Frames([frame], [])
        if len(messages) == 1:
            return Frames([], list(messages))
    half = len(messages) // 2
    first, second = make_frames(messages[:half], limit), make_frames(messages[half:], limit)
    return Frames(first.encoded + second.encoded, first.too_long + second.too_long)


def greeting(key: bytes = NO_KEY, version: int = FRAMING_VERSION) -> bytes:
    """What each end says first."""
    return GREETING.pack(MAGIC, version) + key


def wrong_greeting(data: bytes | bytearray) -> str | None:
    """Why nothing more can be said to whose greeting begins like this, None where it can."""
    magic, version = GREETING.unpack(data)
    if magic != MAGIC:
        return f"it does not speak pdserve's control protocol: it began with {bytes(data)!r}"
    if version != FRAMING_VERSION:
        return (
            f"it speaks version {version} of the control channel, this instance {FRAMING_VERSION}; "
            "run the same pdserve on both sides"
        )
    return None
