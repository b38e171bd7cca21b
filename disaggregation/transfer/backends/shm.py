"""KV pages between processes of one host: the writer maps the peer's pool and copies.

A pool is a memfd. Its owner listens on an abstract Unix socket, which has no file. A writer of the same user that
introduces itself well gets the descriptors of all pools. The connection stays open as the lease. The kernel closes it
after the writer's last access, however the writer ends, so its end means that nothing more can be written. The owner
can't take the mappings away. To part, it half-closes the connection; the writer then unmaps and closes its end.

A pool on a device is not a memfd, and no other process can map it. Its owner says so in its offer and takes the pages
over the connection itself (``page_stream.py``).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ....mem_cache.kv_pages.page_group import PageGroup
from ....mem_cache.kv_pages.region import RegionError
from ...errors import LinkLost
from ...wire.stream import Stream, expect_end
from ..page_write import PageWrite, paired_spans
from . import unix_address
from .base import Capabilities, Completion, WriteHandle, WriteState
from .handshake import Offer
from .link import IncomingLink, OutgoingLink
from .page_stream import StreamBackend, StreamWriter
from .unix_address import DescriptorStream, host_id

SHORT_BYTES = 128 << 10
"""What is copied as a memoryview: half the overhead of an array, which in return lets other threads run meanwhile."""


class ShmBackend(StreamBackend):
    """Transfer backend that copies KV pages through shared memory between processes of one host. ``host`` is not used.

    Pools on a device are sent over the Unix socket instead. Otherwise ``LinkDown`` waits until the writer unmaps.
    """

    name = "shm"
    can = Capabilities(revokes=False, completion=Completion.AT_ONCE)

    def register(self, groups: Sequence[PageGroup]) -> bytes:
        self.streams = any(group.staging is not None for group in groups)
        if self.streams:
            self.can = Capabilities(checks_grants=True)
        return super().register(groups)

    def _listen(self) -> tuple[socket.socket, Offer]:
        if not self.streams and any(group.region.fd is None for group in self.groups):
            raise RegionError("the shm backend needs a KV region in shared memory: allocate_region(…, shared=True)")
        sock, place = unix_address.listen()
        return sock, self._offer(place, host_id=host_id(), streams=self.streams)

    def _dial(self, offer: Offer) -> OutgoingLink:
        sock = unix_address.dial(offer.place)
        if offer.streams:
            return StreamWriter(Stream(sock), offer, self.groups, self.stall_seconds)
        return _ShmWriter(DescriptorStream(sock), offer, self.groups)

    def _unreachable(self, offer: Offer, reason: str) -> str:
        why = (
            "it runs on another host or in another network namespace (container), which shared memory does not reach; "
            "start both instances with --disaggregation-transfer-backend tcp"
            if offer.host_id != host_id()
            else "its process has ended"
        )
        return f"can't reach the KV pool of peer {offer.epoch}: {reason}; {why}"

    def _accepted(self, sock: socket.socket) -> IncomingLink:
        unix_address.check_user(sock)
        return self._reader(Stream(sock)) if self.streams else _ShmReader(Stream(sock))

    def _send_welcome(self, link: IncomingLink, data: bytes) -> None:
        if self.streams:
            super()._send_welcome(link, data)
            return
        descriptors = [group.region.fd for group in self.groups if group.region.fd is not None]
        unix_address.send_descriptors(link.stream.sock, data, descriptors)


class _ShmWriter(OutgoingLink):
    stream: DescriptorStream

    def __init__(self, stream: DescriptorStream, offer: Offer, groups: Sequence[PageGroup]) -> None:
        super().__init__(stream, offer)
        self._groups = groups
        self._local = [np.frombuffer(group.region.view(), dtype=np.uint8) for group in groups]
        self._mappings: list[mmap.mmap] = []
        self._remote: list[npt.NDArray[np.uint8]] = []

    def opened(self) -> None:
        if len(self.stream.descriptors) != len(self.offer.groups):
            raise LinkLost("the peer did not send its pools' descriptors")
        try:
            for fd, group in zip(self.stream.descriptors, self.offer.groups, strict=True):
                nbytes = group.num_pages * group.page_bytes
                # A file that shrinks under a mapping kills the process that touches it.
                if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                    raise LinkLost("the peer's pool may shrink")
                if os.fstat(fd).st_size < nbytes:
                    raise LinkLost("the peer's pool is smaller than it said")
                self._mappings.append(mmap.mmap(fd, nbytes))
        except OSError as e:
            raise LinkLost(f"can't map the peer's pool: {e.strerror}") from e
        while self.stream.descriptors:
            os.close(self.stream.descriptors.pop())
        self._remote = [np.frombuffer(mapping, dtype=np.uint8) for mapping in self._mappings]
        expect_end(self.stream)

    def write(self, pages: PageWrite) -> WriteHandle:
        here: Any = self._local[pages.group]
        there: Any = self._remote[pages.group]
        local, remote = paired_spans(pages, self._groups[pages.group])
        if len(local) and int(local[0, 1]) < SHORT_BYTES:
            here, there = here.data, there.data
        for (source, length), target in zip(local.tolist(), remote[:, 0].tolist(), strict=True):
            there[target : target + length] = here[source : source + length]
        return WriteHandle(WriteState.DONE)

    def closed(self, reason: str) -> None:
        self._local, self._remote = [], []
        for mapping in self._mappings:
            mapping.close()
        self._mappings.clear()


class _ShmReader(IncomingLink):
    def opened(self) -> None:
        expect_end(self.stream)

    def let_go(self) -> bool:
        with contextlib.suppress(OSError):  # the writer may be gone already: its end is about to be read
            self.stream.sock.shutdown(socket.SHUT_WR)
        return False
