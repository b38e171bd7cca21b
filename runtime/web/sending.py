"""Limits on how slowly a client may read its answer.

Two limits close the connection of a client that reads nothing. A timer here sees the bytes that wait in this process.
TCP_USER_TIMEOUT sees the bytes that wait in the kernel, even after the client's host has vanished.

The timer resets the connection. The kernel's limit comes first if a client reads nothing at all, and sends it nothing.
Such a client learns that its connection is gone when it reads again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

CHECKS = 4
"""Number of checks of a connection within its time limit."""
KERNEL_SEND_BYTES = 256 << 10
"""Maximum bytes of an answer in the kernel. Without it, each client that does not read takes 4 MiB."""
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
KEEP_ALIVE_IDLE_SECONDS, KEEP_ALIVE_INTERVAL_SECONDS, KEEP_ALIVE_PROBES = 30, 10, 3
"""TCP's own probes: a vanished host is noticed within a minute while nothing is sent to it."""


def limit_socket(transport: asyncio.BaseTransport, send_seconds: float) -> None:
    """Set the kernel's limits on a client's connection, as far as this system has them.

    The kernel closes it if the client takes nothing for ``send_seconds``, or its host does not answer TCP's probes.
    """
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    options = [(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_SEND_BYTES), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    tcp = {
        "TCP_USER_TIMEOUT": max(1, int(1000 * send_seconds)),
        "TCP_KEEPIDLE": KEEP_ALIVE_IDLE_SECONDS,
        "TCP_KEEPINTVL": KEEP_ALIVE_INTERVAL_SECONDS,
        "TCP_KEEPCNT": KEEP_ALIVE_PROBES,
    }
    options += [(socket.IPPROTO_TCP, getattr(socket, n), value) for n, value in tcp.items() if hasattr(socket, n)]
    # The client may be gone already.
    with contextlib.suppress(OSError):
        for level, name, value in options:
            sock.setsockopt(level, name, value)


class SendLimit:
    """Aborts a transport that has data to send and sends none of it for ``seconds``.

    ``start`` may be called at any time; the watch ends by itself when everything is sent.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._transport = transport
        self._loop = loop
        self._interval = seconds / CHECKS
        self._timer: asyncio.TimerHandle | None = None
        self._waiting_bytes = 0
        self._unchanged = 0

    def start(self) -> None:
        """Watch the transport until it has sent what it has to send; nothing happens if it is watched already."""
        if self._timer is None and (size := self._transport.get_write_buffer_size()):
            self._waiting_bytes, self._unchanged = size, 0
            self._timer = self._loop.call_later(self._interval, self._check)

    def stop(self) -> None:
        """Stop watching the transport."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def reset(self) -> None:
        """Abort the transport, and have the kernel drop what it has still to send to the client.

        Otherwise the kernel would wait for the client as long again.
        """
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self._transport.abort()

    def _check(self) -> None:
        self._timer = None
        size = self._transport.get_write_buffer_size()
        if not size:
            return
        # More than before is a write of ours and no progress, but no proof of none: a full buffer takes no writes.
        self._unchanged = self._unchanged + 1 if size == self._waiting_bytes else 0
        self._waiting_bytes = size
        if self._unchanged >= CHECKS:
            self.reset()
        else:
            self._timer = self._loop.call_later(self._interval, self._check)
