"""A decode's end of a control connection, to one prefill.

    CONNECTING (in the background) → GREETING → OPEN → ended (``connection_ended`` says why), → ``close``

It does not connect anew: when its connection breaks, the peer that it knew is gone, and whoever listens there next is
another one, to be found through the bootstrap server again.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

from ....messages.base import Message
from ....messages.decode import Codec
from ....messages.handover import PrefillToDecode
from ...errors import LinkLost, ProtocolBroken
from ...wire import tcp_socket
from ...wire.reactor import Reactor
from .connection import ControlConnection
from .frames import FRAME_MESSAGES, TO_DECODE_BYTES, TO_PREFILL_BYTES, make_frames

CONNECT_SECONDS = 5.0
"""Until the prefill's greeting has come."""
SILENCE_SECONDS = 10.0
UNREAD_BYTES = 64 << 20
"""That may wait for a prefill to read. Its silence ends it long before."""


class ControlClient:
    """Its socket is watched by ``reactor``, whose descriptor the owner waits for.

    ``address`` is an IP address: looking up a name could wait. Raises ``ValueError`` for anything else, and
    ``OSError`` for what fails at once.
    """

    def __init__(self, reactor: Reactor, address: str, port: int, *, connect_seconds: float = CONNECT_SECONDS) -> None:
        self._place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        self._connect_seconds = connect_seconds
        self._deadline = time.monotonic() + connect_seconds
        self._codec: Codec[Any] = Codec(PrefillToDecode, TO_DECODE_BYTES, FRAME_MESSAGES)
        self._ended: str | None = None
        sock = socket.socket(tcp_socket.address_family(address), socket.SOCK_STREAM)
        try:
            tcp_socket.tune(sock, SILENCE_SECONDS)
            tcp_socket.start_connecting(sock, address, port)
            self._connection = ControlConnection(sock, reactor, TO_DECODE_BYTES, UNREAD_BYTES)
        except OSError:
            sock.close()
            raise

    def recv(self) -> list[Any] | None:
        """The next frame's messages, None when there is none; raises ``UndeclaredMessage``."""
        if self._ended is not None:
            return None
        try:
            self._connection.flush()
            frame = self._connection.read().frame
            self._check_deadline()
        except LinkLost as e:
            self._end(e)
            return None
        return None if frame is None else self._codec.decode(frame)

    def send(self, messages: Sequence[Message]) -> list[Message]:
        """Queue for the peer; in vain once the connection has ended. Returns what is too long to be sent."""
        frames, too_long = make_frames(messages, TO_PREFILL_BYTES)
        if self._ended is None and frames:
            try:
                self._connection.send(frames)
            except LinkLost as e:
                self._end(e)
        return too_long

    def connection_ended(self) -> str | None:
        """Why the connection is over, or could not be made; None while it is well. As far as ``recv`` has read."""
        return self._ended

    def close(self) -> None:
        """Close at once; what the kernel has taken still leaves."""
        self._end(LinkLost("closed"))

    def _check_deadline(self) -> None:
        if not self._connection.greeted and time.monotonic() > self._deadline:
            raise LinkLost(f"it does not answer (for {self._connect_seconds:g} s)")

    def _end(self, why: LinkLost) -> None:
        if self._ended is not None:
            return
        if not self._connection.greeted:
            self._ended = f"its control port at {self._place} can't be used: {why}"
        elif isinstance(why, ProtocolBroken):
            self._ended = f"the prefill instance at {self._place} broke the protocol: {why}"
        else:
            self._ended = "the prefill instance closed the connection or died"
        # Now, since what is over stays readable for ever, and the owner must be able to sleep.
        self._connection.close()
