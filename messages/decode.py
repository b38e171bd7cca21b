"""The one function that decodes bytes from a socket.

Bytes from a socket are hostile until they are decoded. A frame either gives messages, or it is refused with
``UndeclaredMessage`` and changes nothing. No frame ends a process.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

import msgspec

from .base import Message

T = TypeVar("T")
M = TypeVar("M", bound=Message)

SHOWN_CHARS = 300
"""Maximum characters of a peer's or client's text in a log line or an error."""


class UndeclaredMessage(ValueError):
    """A frame held something that its channel does not declare. Dropping the frame is the only answer."""


def decode(
    decoder: msgspec.msgpack.Decoder[T] | msgspec.json.Decoder[T], data: bytes | bytearray | memoryview, limit: int
) -> T:
    """Decode ``data`` (at most ``limit`` bytes); raises ``UndeclaredMessage`` and nothing else."""
    if len(data) > limit:
        raise UndeclaredMessage(f"dropped a frame of {len(data)} bytes: at most {limit} are taken here")
    try:
        return decoder.decode(data)
    except Exception as e:
        # Broad on purpose: a frame can cause more than msgspec's own errors. Bad UTF-8 is a UnicodeDecodeError, deep
        # nesting a RecursionError, and the next version may raise others.
        raise UndeclaredMessage(f"dropped a frame of {len(data)} bytes: {shown(str(e))}") from e


def shown(text: str, limit: int = SHOWN_CHARS) -> str:
    """Make untrusted ``text`` fit for one log line: at most ``limit`` characters, all of them printable."""
    cut = text if len(text) <= limit else f"{text[:limit]}…"
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cut)


class Codec(Generic[M]):
    """Decoder of one channel's frames, each a msgpack list of messages.

    ``declared`` is a union of ``Message`` types. A frame has at most ``limit`` bytes and, if given, ``most`` messages.
    """

    def __init__(self, declared: Any, limit: int, most: int | None = None) -> None:
        frame = Annotated[list[declared], msgspec.Meta(max_length=most)]
        self._decoder: msgspec.msgpack.Decoder[list[M]] = msgspec.msgpack.Decoder(frame)
        self._limit = limit

    def decode(self, frame: bytes | memoryview) -> list[M]:
        """Return the messages of a frame; raises ``UndeclaredMessage`` for one that is too long or not declared."""
        return decode(self._decoder, frame, self._limit)
