"""The control plane's sockets: a prefill listens (ROUTER), decodes connect to it (DEALER), over TCP.

Both ends are polled, never waited on. A client socket does not reconnect: when its connection breaks, the peer that it
knew is gone, and whoever listens there next is another one, to be found through the bootstrap server again.

Anybody can connect, and nothing that comes may end the process or grow without a limit: frames are bounded in bytes
and messages, queues by high-water marks (beyond them TCP itself holds the sender back), and whoever reads takes at most
``MESSAGES_A_TURN`` before others have their turn. What is left unread wakes the poller again, which is level-triggered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..messages.base import Message
from ..messages.channel import LINGER_MS, encode
from ..messages.decode import Codec, UndeclaredMessage
from ..messages.handover import DecodeToPrefill, PrefillToDecode

TO_PREFILL_BYTES = (1 << 20) + 4096
"""Of one frame: the page numbers of the longest ``TransferRequest``, and what is around them."""
TO_DECODE_BYTES = 64 << 20
"""Of one frame: ``TransferDone`` brings the log-probabilities of a whole prompt."""
FRAME_MESSAGES = 1024
MESSAGES_A_TURN = 2048
RECEIVE_FRAMES = 64
"""Frames that wait unread for each connection, at a prefill."""
RECEIVE_LONG_FRAMES = 16
"""The same at a decode, whose frames may be longer."""
SEND_FRAMES = 4096
"""Frames that wait for a peer that does not read. An honest one counts as dead long before: it beats."""
HANDSHAKE_MS = 5000
"""A connection that has not finished ZMQ's own handshake by then is dropped."""


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


class ControlServer:
    """A prefill's end. Peers are told apart by the identity that ZMQ gives each connection."""

    def __init__(self, ctx: zmq.Context[Any], host: str) -> None:
        self.socket = ctx.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.socket.setsockopt(zmq.SNDHWM, SEND_FRAMES)
        self.socket.setsockopt(zmq.RCVHWM, RECEIVE_FRAMES)
        self.socket.setsockopt(zmq.MAXMSGSIZE, TO_PREFILL_BYTES)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if ":" in host:
            self.socket.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        self.port: int = self.socket.bind_to_random_port(f"tcp://{host}")
        self._codec: Codec[Any] = Codec(DecodeToPrefill, TO_PREFILL_BYTES, FRAME_MESSAGES)

    def recv(self) -> tuple[bytes, list[Any]] | None:
        """The next frame and who sent it, None when there is none; raises ``UndeclaredMessage``."""
        if not self.socket.poll(0):
            return None
        parts = self.socket.recv_multipart(zmq.DONTWAIT)
        if len(parts) != 2:
            raise UndeclaredMessage(f"dropped a message of {len(parts) - 1} frames: one is what is sent here")
        return parts[0], self._codec.decode(parts[1])

    def send(self, identity: bytes, messages: Sequence[Message]) -> list[Message]:
        """To one peer; dropped by ZMQ where that peer's connection is gone. Returns what is too long to be sent."""
        frames, too_long = make_frames(messages, TO_DECODE_BYTES)
        for frame in frames:
            try:
                self.socket.send_multipart([identity, frame], zmq.DONTWAIT)
            except zmq.ZMQError:
                # The peer is gone, or reads nothing: its silence ends it. No send may end this process.
                break
        return too_long


class ControlClient:
    """A decode's end, for one prefill. Raises ``zmq.ZMQError`` for an address that is none."""

    def __init__(self, ctx: zmq.Context[Any], address: str) -> None:
        self.socket = ctx.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        # What this end has to say is bounded by its own requests, and must not be lost while the peer is busy.
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, RECEIVE_LONG_FRAMES)
        self.socket.setsockopt(zmq.MAXMSGSIZE, TO_DECODE_BYTES)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.socket.setsockopt(zmq.IPV6, 1)
        ended = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
        self.monitor = self.socket.get_monitor_socket(ended)
        self._codec: Codec[Any] = Codec(PrefillToDecode, TO_DECODE_BYTES, FRAME_MESSAGES)
        try:
            self.socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    def recv(self) -> list[Any] | None:
        """The next frame's messages, None when there is none; raises ``UndeclaredMessage``."""
        if not self.socket.poll(0):
            return None
        parts = self.socket.recv_multipart(zmq.DONTWAIT)
        if len(parts) != 1:
            raise UndeclaredMessage(f"dropped a message of {len(parts)} frames: one is what is sent here")
        return self._codec.decode(parts[0])

    def send(self, messages: Sequence[Message]) -> list[Message]:
        """Queue for the peer. Returns what is too long to be sent."""
        frames, too_long = make_frames(messages, TO_PREFILL_BYTES)
        for frame in frames:
            try:
                self.socket.send(frame, zmq.DONTWAIT)
            except zmq.ZMQError:
                # A connection that broke takes nothing more; `connection_ended` says so in the next turn.
                break
        return too_long

    def connection_ended(self) -> bool:
        """Whether the connection broke, or could not be made."""
        ended = False
        while self.monitor.poll(0):
            recv_monitor_message(self.monitor)
            ended = True
        return ended

    def close(self) -> None:
        """Close at once; what was not sent is dropped."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()
