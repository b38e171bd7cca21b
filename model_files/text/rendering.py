"""What the process that renders chat templates is asked, and how: frames on a stream socket.

A frame is its length (4 bytes, little-endian) and a msgpack message. The first one that a process gets is a
``TemplateSource``, answered by a ``Rendered`` without text; each ``Conversation`` after it is answered by another.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import TypeVar

import msgspec

from ...messages.conversation import Conversation
from .named_templates import NamedTemplates

T = TypeVar("T", "TemplateSource", "Rendered", Conversation)
MAX_FRAME_BYTES = 1 << 28
_length = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


class RenderLimits(msgspec.Struct, frozen=True):
    """What rendering one conversation, or compiling the template, may take.

    ``cpu_seconds``: of the process's time. ``memory_bytes``: address space beside that of the process at its start.
    ``seconds``: until the process is given up, whatever it does; a busy machine may need it for a modest template.
    """

    cpu_seconds: float = 1.0
    memory_bytes: int = 1 << 30
    seconds: float = 60.0


class TemplateSource(msgspec.Struct, frozen=True):
    """The templates to compile, the variables that they may print, and what they may take."""

    sources: NamedTemplates
    special_tokens: dict[str, str]
    limits: RenderLimits


class Rendered(msgspec.Struct, frozen=True):
    """``text`` in UTF-8, which may hold surrogates; or ``error``, and the ``field`` of the request that is at fault."""

    text: bytes = b""
    error: str = ""
    field: str = ""


class BrokenStream(Exception):
    """The other end is gone, or sends what is no frame."""


class Frames:
    """One end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, message: TemplateSource | Conversation | Rendered, deadline: float | None = None) -> None:
        """Send ``message`` with its length before it. Raises ``OSError``, and ``TimeoutError`` at ``deadline``.

        ``deadline``: time of the monotonic clock in seconds; None: no limit.
        """
        body = _encoder.encode(message)
        self._limit(deadline)
        self._sock.sendall(_length.pack(len(body)) + body)

    def receive(self, kind: type[T], deadline: float | None = None) -> T:
        """Wait for a message and return it. Raises ``BrokenStream``, ``OSError``, or ``TimeoutError`` at ``deadline``.

        ``deadline``: time of the monotonic clock in seconds; None: no limit.
        """
        (length,) = _length.unpack(self._read(_length.size, deadline))
        if length > MAX_FRAME_BYTES:
            raise BrokenStream(f"a frame of {length} bytes")
        try:
            return msgspec.msgpack.decode(self._read(length, deadline), type=kind)
        except msgspec.DecodeError as e:
            raise BrokenStream(f"no {kind.__name__}: {e}") from None

    def close(self) -> None:
        """Close this end of the socket."""
        self._sock.close()

    def _read(self, size: int, deadline: float | None) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._limit(deadline)
            part = self._sock.recv(min(size - len(data), 1 << 20))
            if not part:
                raise BrokenStream("the other end is closed")
            data += part
        return bytes(data)

    def _limit(self, deadline: float | None) -> None:
        self._sock.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
