"""Wire format of a control connection, in both directions: a greeting, then frames.

- Greeting: eight bytes that name the protocol, the framing version, and a key of this connection (or zeros).
- Frame: its length in bytes, then a msgpack list of messages. With a cluster secret it is sealed
  (``connection_cipher.py``).

Numbers are little-endian, 32 bits. The messages have a version of their own, in ``Hello``.
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
"""Protocol name in the greeting. No text, TLS or ZMTP stream begins with its first byte."""
LENGTH = struct.Struct("<I")

SHORT_FRAME_BYTES = (1 << 20) + 4096
"""Maximum size of a short frame, in bytes: the page numbers of the longest ``TransferRequest``, and its envelope."""
LONG_FRAME_BYTES = 17 << 20
"""Maximum size in bytes of a frame from a peer that is asked for KV.

Its ``FirstToken`` brings the log-probabilities of a prompt. 2^20 of them take 16 MiB; that is four times the default of
``--max-logprobs-per-request``. The limit is not higher because of hostile peers. Decoding the densest frame takes 40
times its size in memory, and 0.4 s for each MiB.
"""
FRAME_MESSAGES = 1024
"""Maximum number of messages in a frame."""
MESSAGES_A_TURN = 2048
"""Maximum number of messages read per tick."""


class EncodedFrames(NamedTuple):
    """Encoded frames, and the messages that are ``too_long`` for any frame."""

    encoded: list[bytes]
    too_long: list[Message]


def make_frames(messages: Sequence[Message], limit: int) -> EncodedFrames:
    """Encode messages, in order, in few frames of at most ``limit`` bytes and ``FRAME_MESSAGES`` messages each.

    Messages that exceed ``limit`` alone are returned apart: a receiver ends a connection with longer frames.
    """
    if not messages:
        return EncodedFrames([], [])
    if len(messages) <= FRAME_MESSAGES:
        frame = encode(messages)
        if len(frame) <= limit:
            return EncodedFrames([frame], [])
        if len(messages) == 1:
            return EncodedFrames([], list(messages))
    half = len(messages) // 2
    first, second = make_frames(messages[:half], limit), make_frames(messages[half:], limit)
    return EncodedFrames(first.encoded + second.encoded, first.too_long + second.too_long)


def greeting(key: bytes = NO_KEY, version: int = FRAMING_VERSION) -> bytes:
    """Return the bytes that each end sends first: protocol, framing version and this connection's key (zeros: none)."""
    return GREETING.pack(MAGIC, version) + key


def wrong_greeting(data: bytes | bytearray) -> str | None:
    """Return why a greeting with the first bytes ``data`` (``GREETING.size``) is unacceptable; None if it is
    acceptable.
    """
    magic, version = GREETING.unpack(data)
    if magic != MAGIC:
        return f"it does not speak pdserve's control protocol: it began with {bytes(data)!r}"
    if version != FRAMING_VERSION:
        return (
            f"it speaks version {version} of the control channel, this instance {FRAMING_VERSION}; "
            "run the same pdserve on both sides"
        )
    return None
