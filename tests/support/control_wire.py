"""A hand-made end of a control connection: says whatever a test wants, honest or not."""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import struct
import termios
import time

from pdserve.disaggregation.handover.control.frames import LENGTH, greeting
from support.machine import limit
from support.processes import wait_until

RST = struct.pack("ii", 1, 0)
REPLY_SECONDS = limit(10.0)


def framed(payload: bytes) -> bytes:
    """Return ``payload`` with its length in front."""
    return LENGTH.pack(len(payload)) + payload


class ControlSocket:
    """``send`` sends a payload as a frame, ``send_bytes`` anything."""

    def __init__(self, port: int, *, greet: bool = True) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), REPLY_SECONDS)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.ended = False
        self._came = bytearray()
        self._greeted = False
        if greet:
            self.send_bytes(greeting())

    def send(self, payload: bytes) -> None:
        self.send_bytes(framed(payload))

    def send_bytes(self, data: bytes) -> None:
        self.sock.sendall(data)

    def wait_delivered(self) -> None:
        """Wait until the other end's socket has all that was sent, whether it is read or not."""

        def unacknowledged() -> int:
            left = fcntl.ioctl(self.sock, termios.TIOCOUTQ, struct.pack("i", 0))
            return int(struct.unpack("i", left)[0])

        wait_until(lambda: unacknowledged() == 0, REPLY_SECONDS, "all that was sent has arrived")

    def poll(self, timeout_ms: int = 0) -> bool:
        """Return whether a whole frame has come within ``timeout_ms``."""
        deadline = time.monotonic() + timeout_ms / 1000
        while self._whole() is None and not self.ended:
            if not select.select([self.sock], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                data = b""
            self._came += data
            self.ended = not data
        return self._whole() is not None

    def recv(self) -> bytes:
        """Return the next frame's payload, after ``poll``."""
        size = self._whole()
        assert size is not None
        payload = bytes(self._came[LENGTH.size : LENGTH.size + size])
        del self._came[: LENGTH.size + size]
        return payload

    def has_ended(self) -> bool:
        """Return whether the other end hung up, after reading what came before that."""
        while not self.ended and select.select([self.sock], [], [], 0)[0]:
            try:
                self.ended = not self.sock.recv(1 << 16)
            except ConnectionError:
                self.ended = True
        return self.ended

    def close(self, linger: int | None = None) -> None:
        """Close the socket. With ``linger=0`` it is reset."""
        if linger == 0:
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
        self.sock.close()

    def _whole(self) -> int | None:
        if not self._greeted:
            if len(self._came) < len(greeting()):
                return None
            assert self._came[: len(greeting())] == greeting()
            del self._came[: len(greeting())]
            self._greeted = True
        if len(self._came) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._came)
        return int(size) if len(self._came) >= LENGTH.size + size else None
