"""The ZMQ channels that carry messages between the processes of one instance.

A frame is a msgpack list of messages, so that one send carries a whole step. A channel declares the messages it
accepts; its decoder is built once. A frame that is not a list of those is refused (``decode.py``) and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from .base import Message
from .decode import Codec, UndeclaredMessage

__all__ = ["AsyncReceiver", "Codec", "Receiver", "Sender", "UndeclaredMessage", "encode", "ipc_address"]

M = TypeVar("M", bound=Message)
_encoder = msgspec.msgpack.Encoder()
LINGER_MS = 500
IPC_FRAME_BYTES = 1 << 30
"""No frame between our own processes comes near this; one that does is a fault, not a message."""


def ipc_address(run_dir: Path, name: str) -> str:
    """The address of channel ``name`` of the instance whose run directory (mode 0700) is given."""
    return f"ipc://{run_dir / name}.ipc"


def encode(messages: Sequence[Message]) -> bytes:
    """One frame."""
    return _encoder.encode(messages)


class Sender:
    """The sending end (PUSH, connects). One thread only, as every ZMQ socket."""

    def __init__(self, ctx: zmq.Context[Any], address: str) -> None:
        self._socket = ctx.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(address)

    def send(self, *messages: Message) -> None:
        """Send the messages as one frame; never blocks."""
        if messages:
            self._socket.send(_encoder.encode(messages), zmq.DONTWAIT, copy=True)

    def close(self) -> None:
        """Close; what is still queued has ``LINGER_MS`` to leave."""
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
        """The next frame's messages, or [] after ``timeout_ms`` (-1 waits for ever); raises ``UndeclaredMessage``."""
        # Without a limit a plain recv waits as well as a poll, for a fifth of the Python code.
        if timeout_ms >= 0 and not self.socket.poll(timeout_ms):
            return []
        return self._codec.decode(self.socket.recv(zmq.DONTWAIT if timeout_ms >= 0 else 0))

    def close(self) -> None:
        """Close at once."""
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
        """The next frame's messages; raises ``UndeclaredMessage``."""
        return self._codec.decode(await self._socket.recv())

    def close(self) -> None:
        """Close at once."""
        self._socket.close()
