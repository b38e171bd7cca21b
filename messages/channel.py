"""The ZMQ channels that carry messages between the processes of one instance.

A frame is a msgpack list of messages, so that one send carries a whole step. A channel declares the messages it
accepts; its decoder is built once. A frame that is not a list of those is refused (``decode.py``) and changes nothing.

A receiver cannot answer a frame that it refuses. So ``Sender`` never sends one that is too large. It raises
``FrameTooLarge``, and its caller reports the error to the clients (``too_large.py`` has the texts).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import zmq
import zmq.asyncio

from .base import Message
from .decode import Codec, UndeclaredMessage

__all__ = [
    "AsyncReceiver",
    "Codec",
    "FrameTooLarge",
    "Receiver",
    "Sender",
    "SendsMessages",
    "UndeclaredMessage",
    "encode",
    "ipc_address",
]

M = TypeVar("M", bound=Message)
_encoder = msgspec.msgpack.Encoder()
LINGER_MS = 500
IPC_FRAME_BYTES = 1 << 30
"""Maximum length of a frame between processes of one instance."""


class FrameTooLarge(ValueError):
    """Messages are longer than a frame may be. None of the frame's messages was sent.

    ``messages`` are the ones that do not even fit into a frame of their own. ``size`` is the longest one's, in bytes.
    """

    def __init__(self, messages: list[Message], size: int, limit: int) -> None:
        names = sorted({type(message).__name__ for message in messages})
        super().__init__(f"{', '.join(names)}: {size} bytes are more than a message may have ({limit})")
        self.messages = messages
        self.size = size
        self.limit = limit


class SendsMessages(Protocol):
    """The sending end of a channel; ``Sender`` is one."""

    def send(self, *messages: Message) -> None:
        """Send the messages in order, without blocking. Raises ``FrameTooLarge``, and then sends none of them."""


def ipc_address(run_dir: Path, name: str) -> str:
    """Return the ZMQ address of channel ``name`` of the instance with this run directory (mode 0700)."""
    return f"ipc://{run_dir / name}.ipc"


def encode(messages: Sequence[Message]) -> bytes:
    """Encode messages as one frame, whatever its length."""
    return _encoder.encode(messages)


class Sender:
    """The sending end (PUSH, connects). Like every ZMQ socket, it belongs to one thread.

    ``limit`` is the maximum length of a frame in bytes. ``linger_ms`` is how long queued messages may take to leave
    after ``close``: None means ``LINGER_MS``, -1 means without limit.
    """

    def __init__(
        self, ctx: zmq.Context[Any], address: str, limit: int = IPC_FRAME_BYTES, linger_ms: int | None = None
    ) -> None:
        self._limit = limit
        self._socket = ctx.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS if linger_ms is None else linger_ms)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(address)

    def send(self, *messages: Message) -> None:
        """Queue the messages for sending, without blocking: as one frame if they fit, else as one frame each.

        Raises ``FrameTooLarge`` if a single message is too long, and then sends none of them.
        """
        if not messages:
            return
        frames = [_encoder.encode(messages)]
        if len(frames[0]) > self._limit:
            frames = self._apart(messages)
        for frame in frames:
            # ZMQ copies short frames all the same; a long one is sent from where it lies.
            self._socket.send(frame, zmq.DONTWAIT, copy=False)

    def _apart(self, messages: Sequence[Message]) -> list[bytes]:
        frames = [_encoder.encode((message,)) for message in messages]
        too_long = [message for message, frame in zip(messages, frames, strict=True) if len(frame) > self._limit]
        if too_long:
            raise FrameTooLarge(too_long, max(map(len, frames)), self._limit)
        return frames

    def close(self) -> None:
        """Close the socket without waiting. Messages that are still queued have ``linger_ms`` milliseconds to leave."""
        self._socket.close()


class Receiver(Generic[M]):
    """The receiving end (PULL, binds)."""

    def __init__(self, ctx: zmq.Context[Any], address: str, declared: Any) -> None:
        self.socket = ctx.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address)
        self._codec: Codec[M] = Codec(declared, IPC_FRAME_BYTES)

    def recv(self, timeout_ms: int) -> list[M]:
        """Return the next frame's messages, or [] after ``timeout_ms`` milliseconds; -1 waits without limit.

        Raises ``UndeclaredMessage`` for a frame that the channel does not declare.
        """
        # Without a limit a plain recv waits as well as a poll, for a fifth of the Python code.
        if timeout_ms >= 0 and not self.socket.poll(timeout_ms):
            return []
        return self._codec.decode(self.socket.recv(zmq.DONTWAIT if timeout_ms >= 0 else 0))

    def close(self) -> None:
        """Close the socket at once. Frames that were not received are lost."""
        self.socket.close()


class AsyncReceiver(Generic[M]):
    """The receiving end for an asyncio process."""

    def __init__(self, ctx: zmq.asyncio.Context, address: str, declared: Any) -> None:
        self._socket = ctx.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._codec: Codec[M] = Codec(declared, IPC_FRAME_BYTES)

    async def recv(self) -> list[M]:
        """Wait without limit for the next frame, and return its messages.

        Raises ``UndeclaredMessage`` for a frame that the channel does not declare.
        """
        return self._codec.decode(await self._socket.recv())

    def close(self) -> None:
        """Close the socket at once. Frames that were not received are lost."""
        self._socket.close()
