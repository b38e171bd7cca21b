"""Both ends of a ``cuda_ipc`` link. See ``cuda_ipc.py``."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ....mem_cache.kv_pages.page_group import PageGroup
from ....messages.decode import UndeclaredMessage, decode
from ...errors import LinkLost
from ...wire.stream import Stream
from ..page_write import PageWrite, paired_spans
from .base import WriteHandle
from .handshake import MAX_GROUPS, MAX_MEANS, Offer
from .ipc_driver import DeviceCopy, Export, IpcDriver
from .link import IncomingLink, OutgoingLink
from .receive_buffers import Batch, ReceiveBuffers
from .unix_address import DescriptorStream, process_of
from .write_requests import WRITER_MESSAGE, LeaseMessage, WriteRequest, WriteRequestReader, WriteRequestWriter

log = logging.getLogger(__name__)

SETTLE_SECONDS = 5.0
"""Seconds for queued copies to end before the peer's memory is unmapped. More means that the GPU is stuck."""
SETTLE_POLL_SECONDS = 0.0005
MAX_HANDLE = 256
MAX_DEVICE = 64


class PoolHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The allocation that a pool lies in, and where in it."""

    handle: Annotated[bytes, Meta(min_length=1, max_length=MAX_HANDLE)]
    offset: Annotated[int, Meta(ge=0, le=1 << 48)]


class IpcMeans(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the owner tells a writer that it lets in."""

    device: Annotated[bytes, Meta(max_length=MAX_DEVICE)]
    pools: Annotated[list[PoolHandle], Meta(min_length=1, max_length=MAX_GROUPS)]


_MEANS = msgspec.msgpack.Decoder(IpcMeans)


class _PoolReader(WriteRequestReader):
    """Gives leave for whole batches, to where their pages lie. ``maps``: whether the writer has said that it maps the
    pool, which it says before it does, and before anything else.
    """

    maps = False

    def _on_word(self) -> None:
        is_first, self.maps = not self.maps, True
        if is_first != (self._word[0] == LeaseMessage.MAPS):
            raise LinkLost("the peer does not say first that it maps the pool, or says it again")
        if is_first:
            self.read()
        else:
            super()._on_word()

    @property
    def _is_waiting_for_writer(self) -> bool:
        return bool(self._begun)

    def _begin(self, batch: Batch) -> None:
        self._give_leave(LeaseMessage.POOL, batch, 0, len(batch.pages))

    def _on_written(self, batch: Batch) -> bool:
        return True


class IpcReader(IncomingLink):
    """The owner's end. ``let_go_fd`` and ``process_fd``: one of them can be read once the writer can't write any more.

    OPEN ─▶ leaving: nothing is allowed any more ─▶ the writer has let go, or has ended ─▶ CLOSED

    A writer that goes before it has said that it maps the pool doesn't, and has nothing to let go of.
    """

    def __init__(
        self,
        sock: socket.socket,
        receive_buffers: ReceiveBuffers,
        stall_seconds: float,
        export: Callable[[], tuple[bytes, list[Export]]],
        leave: Callable[[IpcReader], None],
    ) -> None:
        """Open the owner's end of a link on a connected socket.

        ``export`` returns the device and where each pool is now. ``leave`` is called when the writer is
        asked to end its access. It has both descriptors watched, which tell when that is done. Raises ``LinkLost``.
        """
        super().__init__(Stream(sock))
        self.process_fd = process_of(sock)
        try:
            self.let_go_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            os.close(self.process_fd)
            raise
        self.write_requests = _PoolReader(self, receive_buffers, stall_seconds)
        self.is_leaving = False
        self._export = export
        self._leave = leave

    def welcome(self) -> bytes:
        device, exports = self._export()
        return msgspec.msgpack.encode(IpcMeans(device, [PoolHandle(*export) for export in exports]))

    def opened(self) -> None:
        self.write_requests.read()

    @property
    def paused(self) -> bool:
        return self.is_leaving and self.write_requests.maps

    @property
    def is_held(self) -> bool:
        """Whether the writer may still have access to the pool: it has said that it maps it, or may yet say so."""
        return self.write_requests.maps or not self.stream.is_over

    def stalled_at(self) -> float | None:
        return None if self.is_leaving else self.write_requests.stalled_at()

    def let_go(self) -> bool:
        if not self.is_leaving:
            self.is_leaving = True
            self.write_requests.close()
            with contextlib.suppress(OSError):  # the writer may be gone already
                self.stream.sock.shutdown(socket.SHUT_WR)
            self._leave(self)
        return False

    def closed(self, reason: str) -> None:
        self.write_requests.close()
        os.close(self.let_go_fd)
        os.close(self.process_fd)


class _PoolWriter(WriteRequestWriter):
    """Has the driver write to the peer's pool, where it is mapped here."""

    leave = LeaseMessage.POOL

    def __init__(
        self,
        link: IpcWriter,
        groups: Sequence[PageGroup],
        mover: _Copies,
        there: Sequence[int],
    ) -> None:
        """Write to a peer's pools over ``link``. ``there``: address of each of the peer's pools in this process."""
        super().__init__(link, mover, groups)
        self._copies = mover
        self._there = there

    def _start(self, request: WriteRequest, place: int, count: int) -> Any:
        pages = request.pages
        if count != len(pages.src):
            raise LinkLost("the peer gives leave for a part of what was asked for")
        group, there = self._groups[pages.group], self._there[pages.group]
        here, (local, remote) = group.region.address, paired_spans(pages, group)
        return self._copies.start(
            [
                DeviceCopy(there + target, here + source, nbytes)
                for (source, nbytes), (target, _) in zip(local.tolist(), remote.tolist(), strict=True)
            ]
        )


class _Copies:
    """What is under way by one link."""

    def __init__(self, driver: IpcDriver) -> None:
        self._driver = driver
        self._tickets: list[Any] = []
        self._is_broken = False
        """Whether something may have been queued of which there is no ticket."""

    def start(self, pieces: Sequence[DeviceCopy]) -> Any:
        """Queue the copies of ``pieces`` and return their ticket. Raises ``LinkLost``."""
        try:
            ticket = self._driver.copy(pieces)
        except LinkLost:
            self._is_broken = True
            raise
        self._tickets.append(ticket)
        return ticket

    def has_landed(self, write: Any) -> bool:
        """Return whether the copies with ticket ``write`` are complete, and forget the ticket once they are.

        Raises ``LinkLost`` if the driver reports a failed copy.
        """
        if not self._driver.is_done(write):
            return False
        self._tickets.remove(write)
        return True

    @property
    def under_way(self) -> bool:
        """Whether any copy is under way."""
        return bool(self._tickets)

    def settle(self) -> bool:
        """Wait for all copies, at most ``SETTLE_SECONDS``. Return whether they have ended.

        Return False if that cannot be known, as after an error of the driver.
        """
        until = time.monotonic() + SETTLE_SECONDS
        try:
            while self._tickets and time.monotonic() < until:
                if not self.has_landed(self._tickets[0]):
                    time.sleep(SETTLE_POLL_SECONDS)
        except LinkLost as e:
            log.error("the copies to a peer ended badly: %s", e)
            return False
        return not self._tickets and not self._is_broken


class IpcWriter(OutgoingLink):
    """The writer's end: maps the peer's pools, and tells when it has let go of them."""

    stream: DescriptorStream

    def __init__(
        self,
        stream: DescriptorStream,
        offer: Offer,
        groups: Sequence[PageGroup],
        driver: IpcDriver,
        stall_seconds: float,
    ) -> None:
        super().__init__(stream, offer)
        self._groups = groups
        self._driver = driver
        self._stall_seconds = stall_seconds
        self._copies = _Copies(driver)
        self._let_go_fd: int | None = None
        self._mapped: dict[bytes, int] = {}
        self._write_requests: _PoolWriter | None = None

    def opened(self) -> None:
        if len(self.stream.descriptors) != 1:
            raise LinkLost("the peer did not send what to tell it by that this end has let go")
        self._let_go_fd = self.stream.descriptors.pop()

    def welcomed(self, means: bytes) -> None:
        try:
            peer_means = decode(_MEANS, means, MAX_MEANS)
        except UndeclaredMessage as e:
            raise LinkLost(f"the peer does not say where its pools are: {e}") from e
        if len(peer_means.pools) != len(self.offer.groups):
            raise LinkLost("the peer has other pools than it said")
        if why_not := self._driver.why_not(peer_means.device):
            raise LinkLost(why_not)
        self._say_that_it_maps()
        for pool in peer_means.pools:
            if pool.handle not in self._mapped:  # pools may lie in one allocation
                self._mapped[pool.handle] = self._driver.open(pool.handle)
        there = [self._mapped[pool.handle] + pool.offset for pool in peer_means.pools]
        self._write_requests = _PoolWriter(self, self._groups, self._copies, there)
        self._write_requests.read()

    def _say_that_it_maps(self) -> None:
        # At once, and as the first word: the owner must not miss it.
        word = WRITER_MESSAGE.pack(LeaseMessage.MAPS, 0, 0, 0, 0, 0, 0, 0)
        try:
            is_sent = self.stream.sock.send(word) == len(word)
        except OSError as e:
            raise LinkLost(f"the connection broke: {e.strerror}") from e
        if not is_sent:
            raise LinkLost("the connection takes nothing")

    def write(self, pages: PageWrite) -> WriteHandle:
        assert self._write_requests is not None
        return self._write_requests.write(pages)

    @property
    def is_copying(self) -> bool:
        """Whether the device has copies of this link that are not known to be complete."""
        return self._copies.under_way

    def look(self) -> None:
        """Report the writes that are complete to the peer. Raises ``LinkLost`` if a copy failed."""
        if self._write_requests is not None:
            self._write_requests.look()

    def stalled_at(self) -> float | None:
        is_writing = self._write_requests is not None and self._write_requests.under_way
        return self.stream.last_progress + self._stall_seconds if is_writing else None

    def closed(self, reason: str) -> None:
        if self._write_requests is not None:
            self._write_requests.close(reason)
        if self._unmap() and self._let_go_fd is not None:
            with contextlib.suppress(OSError):  # the peer no longer waits for it
                os.eventfd_write(self._let_go_fd, 1)
        if self._let_go_fd is not None:
            os.close(self._let_go_fd)
            self._let_go_fd = None

    def _unmap(self) -> bool:
        """Unmap the peer's pools, and return whether it is certain that nothing is written to them any more.

        If it returns False, the peer waits for the end of this process.
        """
        if not self._copies.settle():
            log.error("pages of peer %s may still be written: it can use them again when this process ends", self.peer)
            return False
        try:
            for address in self._mapped.values():
                self._driver.shut(address)
        except LinkLost as e:
            # No copy writes to it, but the peer must not free it while it is mapped.
            log.error("the memory of peer %s stays mapped: %s", self.peer, e)
            return False
        self._mapped.clear()
        return True
