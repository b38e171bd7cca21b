"""KV pages from GPU to GPU of one host, or within one: the writer maps the peer's pool and copies, device to device.

The owner listens on an abstract Unix socket, as ``shm`` does. A writer of the same user that introduces itself well is
given a handle for each pool's allocation (``cuIpcGetMemHandle``), reports that it opens it, and does so. The connection
is the lease. Over it the writer requests pages (``write_requests.py``), gets a grant, and copies them on a stream of
its own. It reports when the event after the copies has come, and gets an answer when they have landed.

The owner can't end a writer's access: what is mapped stays mapped, and a queued copy is carried out. So when a link
ends, its pages wait until one of two things has happened:

- The writer has waited for its copies, unmapped the pool and reported so by an eventfd that came with the handles.
- The writer's process has ended, which a pidfd shows. The end of the connection is not enough: it comes before the
  driver has taken down what the process had queued.

A writer that writes without a grant can't be stopped; both ends are one user's processes.

**Not tried on a GPU yet.** The tests have a driver for shared memory of the host in the place of CUDA's.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any

from ....mem_cache.kv_pages.page_group import PageGroup
from ....mem_cache.kv_pages.region import RegionError
from ....messages.base import I32, HandoverId
from ...errors import LinkLost, PeerUnreachable
from ..page_write import PageWrite
from . import unix_address
from .base import Capabilities, LinkEvent, WriteHandle
from .cuda_driver import load_driver
from .handshake import Offer
from .ipc_driver import Export, IpcDriver
from .ipc_links import IpcReader, IpcWriter
from .link import IncomingLink, Link, LinkPhase, OutgoingLink
from .receive_buffers import ReceiveBuffers
from .socket_backend import SocketBackend
from .unix_address import DescriptorStream, host_id

_open_driver = load_driver()
"""Function that opens the driver of the device with a number. It raises ``RegionError``."""
COPY_NAP_SECONDS = 2e-5
"""Seconds between two polls of a queued copy. A copy of 4 MiB within a GPU takes as long. The system sleeps longer."""


class CudaIpcBackend(SocketBackend):
    """Transfer backend that copies KV pages from GPU to GPU on one host, by CUDA IPC. ``host`` is not used.

    It can't revoke a writer's access: ``LinkDown`` waits until the writer unmaps the pool or ends.
    """

    name = "cuda_ipc"
    # What an honest writer asks for is held against the grants; one that doesn't ask is not held up.
    can = Capabilities(revokes=False)
    reaches_devices = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receive_buffers = ReceiveBuffers(())
        self._driver: IpcDriver | None = None

    def register(self, groups: Sequence[PageGroup]) -> bytes:
        direct = [group.direct for group in groups if group.direct is not None]
        if len(direct) != len(groups):
            raise RegionError(
                "the cuda_ipc backend moves KV between the memories of GPUs: leave out --kv-staging-size, or use the "
                "shm backend, by way of the host's"
            )
        self._driver = _open_driver(direct[0].ordinal)
        for group in groups:
            # What can't be opened to others is refused now, and not to each peer.
            self._driver.export(group.region.address, group.region.nbytes)
        self._receive_buffers = ReceiveBuffers(groups)
        return super().register(groups)

    def grant(self, peer: str, handover: HandoverId, pages: I32, group: int = 0) -> None:
        self._receive_buffers.grant(peer, handover, pages, group)
        for link in self._readers(peer):
            self._carry_on(link, link.write_requests.granted)

    def revoke(self, peer: str, handover: HandoverId) -> None:
        writer = self._receive_buffers.revoke(peer, handover)
        for link in self._readers(peer):
            if link.write_requests.is_writing(writer):
                self._lost(link, "the peer was still writing pages that it may not write any more")

    def write(self, pages: PageWrite) -> WriteHandle:
        handle = super().write(pages)
        link = self._peers[pages.handover.epoch].outgoing
        if link is not None:
            # The peer waits for nothing else. Should the connection have ended, the next turn hears of it.
            with contextlib.suppress(LinkLost):
                link.stream.on_writable()
        return handle

    def lands_on_device(self, peer: str) -> bool:
        return True

    def progress(self, timeout: float | None) -> list[LinkEvent]:
        if any(link.is_copying for link in self._links if isinstance(link, IpcWriter)):
            # No event announces the end of a copy, so poll.
            time.sleep(COPY_NAP_SECONDS)
            timeout = 0.0
        return super().progress(timeout)

    def close(self) -> None:
        super().close()
        self._receive_buffers.close()
        if self._driver is not None:
            self._driver.close()

    def _readers(self, peer: str) -> list[IpcReader]:
        return [k for k in self._links if isinstance(k, IpcReader) and k.peer == peer and k.phase is LinkPhase.OPEN]

    @property
    def _gpu(self) -> IpcDriver:
        assert self._driver is not None
        return self._driver

    def _exports(self) -> tuple[bytes, list[Export]]:
        """Return the device's UUID, and the IPC handle and offset of each pool as they are now.

        They change when memory is released and resumed. Raises ``LinkLost``.
        """
        try:
            return self._gpu.device, [self._gpu.export(g.region.address, g.region.nbytes) for g in self.groups]
        except RegionError as e:
            raise LinkLost(str(e)) from e

    def _listen(self) -> tuple[socket.socket, Offer]:
        sock, place = unix_address.listen()
        return sock, self._offer(place, host_id=host_id())

    def _dial(self, offer: Offer) -> OutgoingLink:
        if offer.host_id != host_id():
            raise PeerUnreachable(self._unreachable(offer, "it is elsewhere"))
        stream = DescriptorStream(unix_address.dial(offer.place))
        return IpcWriter(stream, offer, self.groups, self._gpu, self.stall_seconds)

    def _unreachable(self, offer: Offer, reason: str) -> str:
        why = (
            "it runs on another host or in another network namespace (container), which cuda_ipc does not reach; start "
            "both instances with --disaggregation-transfer-backend nixl or tcp"
            if offer.host_id != host_id()
            else "its process has ended"
        )
        return f"can't reach the KV pool of peer {offer.epoch}: {reason}; {why}"

    def _accepted(self, sock: socket.socket) -> IncomingLink:
        unix_address.check_user(sock)
        return IpcReader(sock, self._receive_buffers, self.stall_seconds, self._exports, self._wait_for)

    def _send_welcome(self, link: IncomingLink, data: bytes) -> None:
        assert isinstance(link, IpcReader)
        unix_address.send_descriptors(link.stream.sock, data, [link.let_go_fd])

    def _serve(self, link: Link, readable: bool, writable: bool) -> None:
        super()._serve(link, readable, writable)
        if link.phase is LinkPhase.OPEN and link.stream.sending:
            # Answer at once what was read: messages are few and short, and a peer waits for each.
            self._carry_on(link, lambda: None)

    def _advance(self) -> None:
        for link in list(self._links):
            if isinstance(link, IpcWriter) and link.phase is LinkPhase.OPEN:
                self._carry_on(link, link.look)

    # The end of a link, which is the writer's to give

    def _lost(self, link: Link, reason: str) -> None:
        if isinstance(link, IpcReader) and link.phase is LinkPhase.OPEN and link.is_held:
            self._part(link.peer, reason)
            self._rewatch(link)  # it is to be read no more, or until its end
        else:
            super()._lost(link, reason)

    def _wait_for(self, link: IpcReader) -> None:
        # Whether it maps the pool, one that has not said so may say yet.
        self._rewatch(link)
        for fd in (link.let_go_fd, link.process_fd):
            self._reactor.watch(fd, _Over(link), read=True, write=False)

    def _noticed(self, data: object) -> None:
        assert isinstance(data, _Over)
        if data.link.phase is LinkPhase.OPEN:
            super()._lost(data.link, "the peer has let go")

    def _close_link(self, link: Link, reason: str) -> None:
        if isinstance(link, IpcReader):
            self._reactor.forget(link.let_go_fd)
            self._reactor.forget(link.process_fd)
        super()._close_link(link, reason)


class _Over:
    """What is reported when a writer can't write any more."""

    def __init__(self, link: IpcReader) -> None:
        self.link = link
