"""KV pages between processes of one host: the writer maps the peer's pool and copies.

The pool is a memfd. Its owner listens on an abstract Unix socket, which has no file; a writer of the same user that
introduces itself well gets the memfd's descriptor. The connection stays open as the lease: the kernel closes it after
the writer's last access, however the writer ends, so its end means that nothing more can be written. The owner can't
take the mapping away. To part, it half-closes the connection; the writer then unmaps and closes its end.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import secrets
import socket
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...errors import LinkLost, RegionError
from ...wire.listener import BACKLOG
from ...wire.stream import Stream
from ..region import KVRegion
from .base import Spans, WriteHandle, WriteState, check_spans
from .handshake import Offer
from .link import IncomingLink, OutgoingLink
from .socket_backend import SocketBackend

CREDENTIALS = struct.Struct("3i")
DESCRIPTOR_BYTES = array.array("i").itemsize


class ShmBackend(SocketBackend):
    """See the module; ``host`` means nothing here."""

    name = "shm"
    _fd = -1

    def _listen(self, region: KVRegion) -> tuple[socket.socket, Offer]:
        if region.fd is None:
            raise RegionError("the shm backend needs a KV region in shared memory: allocate_region(…, shared=True)")
        self._fd = region.fd
        place = f"pdserve-kv-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(f"\0{place}")
            sock.listen(BACKLOG)
        except OSError:
            sock.close()
            raise
        return sock, self._offer(place, host_id=host_id())

    def _dial(self, offer: Offer) -> OutgoingLink:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(f"\0{offer.place}")
        except OSError:
            sock.close()
            raise
        return _ShmWriter(_DescriptorStream(sock), offer, np.frombuffer(self.pool, dtype=np.uint8), self.page_bytes)

    def _unreachable(self, offer: Offer, reason: str) -> str:
        why = (
            "it runs on another host or in another network namespace (container), which shared memory does not reach; "
            "start both instances with --disaggregation-transfer-backend tcp"
            if offer.host_id != host_id()
            else "its process has ended"
        )
        return f"can't reach the KV pool of peer {offer.epoch}: {reason}; {why}"

    def _accepted(self, sock: socket.socket) -> IncomingLink:
        uid = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[1]
        if uid != os.getuid():
            raise LinkLost(f"user {uid} may not write the KV pool of user {os.getuid()}")
        return _ShmReader(Stream(sock))

    def _send_welcome(self, link: IncomingLink, data: bytes) -> None:
        # Directly, since a descriptor can't be queued; so few bytes always fit into a new connection's buffer.
        try:
            socket.send_fds(link.stream.sock, [data], [self._fd])
        except OSError as e:
            raise LinkLost(f"the connection broke: {e.strerror}") from e


class _DescriptorStream(Stream):
    """Keeps the descriptors that arrive with the bytes."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.descriptors: list[int] = []

    def _receive(self, views: list[memoryview]) -> int:
        received, ancillary, _, _ = self.sock.recvmsg_into(
            views, socket.CMSG_SPACE(DESCRIPTOR_BYTES), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.descriptors += array.array("i", data[: len(data) - len(data) % DESCRIPTOR_BYTES])
        return received

    def close(self) -> None:
        super().close()
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors.clear()


class _ShmWriter(OutgoingLink):
    stream: _DescriptorStream

    def __init__(self, stream: _DescriptorStream, offer: Offer, pool: npt.NDArray[np.uint8], page_bytes: int) -> None:
        super().__init__(stream, offer)
        self._page_bytes = page_bytes
        self._local = pool
        self._mapping: mmap.mmap | None = None
        self._remote = np.empty(0, dtype=np.uint8)

    def opened(self) -> None:
        if len(self.stream.descriptors) != 1:
            raise LinkLost("the peer did not send its pool's descriptor")
        try:
            if os.fstat(self.stream.descriptors[0]).st_size < self.offer.nbytes:
                raise LinkLost("the peer's pool is smaller than it said")
            self._mapping = mmap.mmap(self.stream.descriptors[0], self.offer.nbytes)
        except OSError as e:
            raise LinkLost(f"can't map the peer's pool: {e.strerror}") from e
        os.close(self.stream.descriptors.pop())
        self._remote = np.frombuffer(self._mapping, dtype=np.uint8)
        expect_end(self.stream)

    def write(self, local: Spans, remote: Spans) -> WriteHandle:
        check_spans(remote, self.offer.nbytes, f"pool of peer {self.peer}", self._page_bytes)
        for (source, length), target in zip(local.tolist(), remote[:, 0].tolist(), strict=True):
            # One memcpy; numpy lets other threads run meanwhile.
            self._remote[target : target + length] = self._local[source : source + length]
        return WriteHandle(WriteState.DONE)

    def closed(self, reason: str) -> None:
        self._local = self._remote = np.empty(0, dtype=np.uint8)
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None


class _ShmReader(IncomingLink):
    def opened(self) -> None:
        expect_end(self.stream)

    def let_go(self) -> bool:
        with contextlib.suppress(OSError):  # the writer may be gone already: its end is about to be read
            self.stream.sock.shutdown(socket.SHUT_WR)
        return False


def expect_end(stream: Stream) -> None:
    """Nothing more is said on this connection: wait for its end."""

    def on_byte() -> None:
        raise LinkLost("the peer sent what was not expected")

    stream.read([memoryview(bytearray(1))], on_byte)


def host_id() -> str:
    """Names the kernel and network namespace that this process runs in, outside of which nobody reaches our socket."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
