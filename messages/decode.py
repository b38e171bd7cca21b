"""The one function that decodes what came from a socket.

Whatever comes from a socket is hostile until it is decoded: a frame gives messages, or it is refused with
``UndeclaredMessage`` and changes nothing. No frame ends a process.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

import msgspec

from .base import Message

T = TypeVar("T")
M = TypeVar("M", bound=Message)

SHOWN_CHARS = 300
"""Characters of a stranger's text that reach a log line or an error."""


class UndeclaredMessage(ValueError):
    """A frame held something that its channel does not declare. Dropping the frame is the only answer."""


def decode(
    decoder: msgspec.msgpack.Decoder[T] | msgspec.json.Decoder[T], data: bytes | bytearray | memoryview, limit: int
) -> T:
    """What ``data`` (at most ``limit`` bytes) says; raises ``UndeclaredMessage`` and nothing else."""
    if len(data) > limit:
        raise UndeclaredMessage(f"dropped a frame of {len(data)} bytes: at most {limit} are taken here")
    try:
        return decoder.decode(data)
    except Exception as e:
        # Broad on purpose: msgspec's own errors are not all that a frame can cause. Bad UTF-8 is a UnicodeDecodeError,
        # deep nesting a RecursionError, and what the next version raises is not ours to guess.
        raise UndeclaredMessage(f"dropped a frame of {len(data)} bytes: {shown(str(e))}") from e


def shown(text: str, limit: int = SHOWN_CHARS) -> str:
    """A stranger's ``text``, fit for one log line: cut to ``limit`` characters, without line breaks and the like."""
    cut = text if len(text) <= limit else f"{text[:limit]}…"
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cut)


class Codec(Generic[M]):
    """Decodes the frames of one channel: a msgpack list of messages. ``declared`` is a union of ``Message`` types.

    A frame has at most ``limit`` bytes and, where given, ``most`` messages.
    """

    def __init__(self, declared: Any, limit: int, most: int | None = None) -> None:
        frame = Annotated[list[declared], msgspec.Meta(max_length=most)]
        self._decoder: msgspec.msgpack.Decoder[list[M]] = msgspec.msgpack.Decoder(frame)
        self._limit = limit

    def decode(self, frame: bytes | memoryview) -> list[M]:
        """The frame's messages; raises ``UndeclaredMessage``."""
        return decode(self._decoder, frame, self._limit)
