"""Unix listeners of backends, for processes of one host and one user: abstract names, which no file system has."""

from __future__ import annotations

import array
import os
import secrets
import socket
import struct
from pathlib import Path

from ...errors import LinkLost
from ...wire.listener import BACKLOG
from ...wire.stream import Stream
from .handshake import MAX_GROUPS

CREDENTIALS = struct.Struct("3i")
DESCRIPTOR_BYTES = array.array("i").itemsize
SO_PEERPIDFD = 77
"""asm-generic/socket.h, from Linux 6.5 on."""


def listen() -> tuple[socket.socket, str]:
    """Open a listener on an abstract Unix socket and return it with its name. Raises ``OSError``."""
    place = f"pdserve-kv-{secrets.token_hex(16)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(f"\0{place}")
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock, place


def dial(place: str) -> socket.socket:
    """Connect to the listener ``place``, which must be of this user, and return the socket. It does not wait.

    Raises ``OSError`` and ``LinkLost``.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(f"\0{place}")
        check_user(sock)
    except (OSError, LinkLost):
        sock.close()
        raise
    return sock


def check_user(sock: socket.socket) -> None:
    """Raise ``LinkLost`` if the process at the other end of ``sock`` belongs to another user."""
    uid = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[1]
    if uid != os.getuid():
        raise LinkLost(f"user {uid} and user {os.getuid()} don't share KV pools")


def process_of(sock: socket.socket) -> int:
    """Return a descriptor that becomes readable when the process at the other end has ended with all its memory.

    The caller closes it. Raises ``LinkLost`` if that process can't be seen from here.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:  # an older kernel
        pid = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[0]
    try:
        return os.pidfd_open(pid)
    except OSError as e:
        raise LinkLost(
            f"the peer's process can't be seen from here ({e.strerror}): containers must share its PIDs"
        ) from e


def host_id() -> str:
    """Return a text that identifies the kernel's start and network namespace of this process.

    Peers with another one can't reach its Unix sockets.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


class DescriptorStream(Stream):
    """Keeps the descriptors that arrive with the bytes."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.descriptors: list[int] = []

    def _receive(self, views: list[memoryview]) -> int:
        received, ancillary, _, _ = self.sock.recvmsg_into(
            views, socket.CMSG_SPACE(MAX_GROUPS * DESCRIPTOR_BYTES), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.descriptors += array.array("i", data[: len(data) - len(data) % DESCRIPTOR_BYTES])
        return received

    def close(self) -> None:
        """Close the connection, and the received descriptors that have not been taken."""
        super().close()
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors.clear()


def send_descriptors(sock: socket.socket, data: bytes, descriptors: list[int]) -> None:
    """Send descriptors with ``data`` on a new connection, at once, since a descriptor can't be queued.

    The few bytes always fit into its buffer. Raises ``LinkLost`` if the connection is broken.
    """
    try:
        socket.send_fds(sock, [data], descriptors)
    except OSError as e:
        raise LinkLost(f"the connection broke: {e.strerror}") from e
