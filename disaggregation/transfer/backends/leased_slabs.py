"""One-sided writes to slabs of the owner's host memory, for an owner with its pool on a device.

The owner can't see when the library has filled a slab, so writer and owner exchange messages on the lease
(``write_requests.py``). The owner's leave names a slab for some of the pages. The owner hashes what was written there,
brings it into its order of pages and copies it to the device. Then the next slab follows, or the batch has landed.

Several batches may be under way, each with one slab at a time. A batch that waits for a slab holds none, so even with
little memory every batch makes progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ....mem_cache.kv_pages.page_group import PageGroup, Spans
from ....mem_cache.kv_pages.staging import Slabs
from ...errors import LinkLost
from .link import Link
from .receive_buffers import Batch, ReceiveBuffers, StagedWrite
from .write_requests import LeaseMessage, WriteRequest, WriteRequestReader, WriteRequestWriter


class Filler(Protocol):
    """Interface to the library object that fills slabs; see ``leased_backend.Initiator``."""

    def fill(self, group: int, spans: Spans, there: int) -> Any:
        """Begin to write the pieces ``spans`` of our pool ``group``, one after the other, to the peer's address
        ``there``.

        Return a token for ``has_landed``.
        """
        ...

    def has_landed(self, write: Any) -> bool:
        """Return whether every byte of ``write``, a token of ``fill``, has arrived in the peer's memory; never wait."""
        ...


class SlabReader(WriteRequestReader):
    """The pool owner's end of one link with slabs."""

    def __init__(self, link: Link, receive_buffers: ReceiveBuffers, slabs: Slabs, stall_seconds: float) -> None:
        super().__init__(link, receive_buffers, stall_seconds)
        self._slabs = slabs
        self._passing: dict[int, StagedWrite] = {}

    @property
    def _is_waiting_for_writer(self) -> bool:
        return any(staged.slab is not None for staged in self._passing.values())

    def _begin(self, batch: Batch) -> None:
        self._passing[batch.number] = staged = self._receive_buffers.staged(batch)
        self.next_slab(staged)

    def next_slab(self, staged: StagedWrite, *, in_turn: bool = False) -> None:
        """Tell the writer of ``staged`` which slab to fill next, or queue ``staged`` if no slab is free.

        ``in_turn``: it is the first of those that wait.
        """
        slab = self._receive_buffers.take_slab(self._link, staged, in_turn=in_turn)
        if slab is not None:
            self._give_leave(LeaseMessage.SLAB, staged.batch, self._slabs.offset_of(slab), len(staged.part))

    def close(self) -> None:
        """Free all slabs of this link, and drop its batches."""
        super().close()
        self._receive_buffers.leave(self._link)
        for staged in self._passing.values():
            staged.drop()
        self._passing.clear()

    def _on_written(self, batch: Batch) -> bool:
        staged = self._passing[batch.number]
        if staged.slab is None:
            raise LinkLost("the peer filled what it was not given")
        if staged.land(staged.slab):
            del self._passing[batch.number]
            return True
        self.next_slab(staged)
        return False


class SlabWriter(WriteRequestWriter):
    """The writer's end of one link with slabs."""

    leave = LeaseMessage.SLAB

    def __init__(self, link: Link, initiator: Filler, groups: Sequence[PageGroup], address: int, nbytes: int) -> None:
        """Create the writer's end. ``address`` and ``nbytes`` describe all slabs in the owner's process."""
        super().__init__(link, initiator, groups)
        self._initiator = initiator
        self._address = address
        self._nbytes = nbytes

    def _start(self, request: WriteRequest, place: int, count: int) -> Any:
        group, pages = self._groups[request.pages.group], request.pages
        if place + count * group.piece_bytes(pages.layers) > self._nbytes:
            raise LinkLost("the peer offers a slab that it does not have")
        spans = group.spans(pages.src[request.at : request.at + count], pages.layers)
        return self._initiator.fill(pages.group, spans, self._address + place)
