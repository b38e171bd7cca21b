"""The control plane's sockets: a prefill listens (ROUTER), decodes connect to it (DEALER), over TCP.

Both ends are polled, never waited on. A client socket does not reconnect: when its connection breaks, the peer that it
knew is gone, and whoever listens there next is another one, to be found through the bootstrap server again.
"""

from __future__ import annotations

from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..messages.base import Message
from ..messages.channel import LINGER_MS, Codec, encode
from ..messages.handover import DecodeToPrefill, PrefillToDecode


class ControlServer:
    """A prefill's end. Peers are told apart by the identity that ZMQ gives each connection."""

    def __init__(self, ctx: zmq.Context[Any], host: str) -> None:
        self.socket = ctx.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        if ":" in host:
            self.socket.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        self.port: int = self.socket.bind_to_random_port(f"tcp://{host}")
        self._codec: Codec[Any] = Codec(DecodeToPrefill)

    def recv(self) -> tuple[bytes, list[Any]] | None:
        """The next frame and who sent it, None when there is none; raises ``UndeclaredMessage``."""
        if not self.socket.poll(0):
            return None
        parts = self.socket.recv_multipart(zmq.DONTWAIT)
        return parts[0], self._codec.decode(parts[-1])

    def send(self, identity: bytes, *messages: Message) -> None:
        """To one peer; dropped by ZMQ where that peer's connection is gone."""
        self.socket.send_multipart([identity, encode(messages)], zmq.DONTWAIT)


class ControlClient:
    """A decode's end, for one prefill. Raises ``zmq.ZMQError`` for an address that is none."""

    def __init__(self, ctx: zmq.Context[Any], address: str) -> None:
        self.socket = ctx.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.socket.setsockopt(zmq.IPV6, 1)
        ended = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
        self.monitor = self.socket.get_monitor_socket(ended)
        self._codec: Codec[Any] = Codec(PrefillToDecode)
        try:
            self.socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    def recv(self) -> list[Any]:
        """The next frame's messages, [] when there is none; raises ``UndeclaredMessage``."""
        if not self.socket.poll(0):
            return []
        return self._codec.decode(self.socket.recv(zmq.DONTWAIT))

    def send(self, *messages: Message) -> None:
        """Queue for the peer."""
        self.socket.send(encode(messages), zmq.DONTWAIT)

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
