"""Write permissions of hand-overs, and staging of a device's pages through slabs of host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ....mem_cache.kv_pages.page_group import LayerRange, PageGroup
from ....mem_cache.kv_pages.staging import Piece
from ....messages.base import I32, HandoverId
from ..page_checksums import PageChecksums
from .grants import Grants, Writer

if TYPE_CHECKING:
    from .link import Link

PAGE_NUMBER = np.dtype("<i4")
MAX_PAGES = 1 << 16
"""Maximum number of pages in a batch."""
MAX_BATCH_BYTES = 1 << 30
"""Maximum size of a batch in bytes, checked by both ends."""


class GrantedPool(NamedTuple):
    """A pool that peers write to, with their grants."""

    number: int
    """Number of the group in the backend."""
    group: PageGroup
    memory: memoryview
    """The pool's host memory. Empty for a pool on a device that peers write to directly."""
    grants: Grants


class Batch(NamedTuple):
    """Pages that a peer wants to write. ``number``: the peer's id for them."""

    number: int
    writer: Writer
    pool: GrantedPool
    layers: LayerRange
    pages: npt.NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        """Size of all pages in bytes."""
        return len(self.pages) * self.pool.group.piece_bytes(self.layers)

    @property
    def is_granted(self) -> bool:
        """Whether the pages may be written now."""
        return self.pool.grants.covers(self.writer, self.pages)


class StagedWrite:
    """A batch that passes through slabs, one at a time. ``at``: number of pages that are on the device."""

    def __init__(self, batch: Batch, landed: PageChecksums) -> None:
        """Prepare to stage ``batch``. Checksums of its pages are recorded in ``landed``."""
        group = batch.pool.group
        assert group.staging is not None
        self.batch = batch
        self.slab: memoryview | None = None
        self.at = 0
        self._staging = group.staging
        self._landing = landed.landing(group, batch.pool.number, batch.layers, batch.pages)

    @property
    def can_take(self) -> bool:
        """Whether a slab is free."""
        return self._staging.slabs.free > 0

    def take(self) -> memoryview | None:
        """Take a slab and return it. Return None if none is free."""
        self.slab = self._staging.slabs.take()
        return self.slab

    @property
    def part(self) -> I32:
        """The next pages, as many as fit in a slab."""
        count = self._staging.slabs.slab_bytes // self.batch.pool.group.piece_bytes(self.batch.layers)
        return self.batch.pages[self.at : self.at + count]

    def filled(self, slab: memoryview) -> memoryview:
        """Return the part of the slab that the next pages fill."""
        return slab[: len(self.part) * self.batch.pool.group.piece_bytes(self.batch.layers)]

    def land(self, slab: memoryview) -> bool:
        """Copy the filled slab's pages to the device, and release the slab. Return whether these were the last."""
        part, memory = self.part, self.filled(slab)
        spans = self.batch.pool.group.spans(part, self.batch.layers)
        self._landing.pass_on(memory)
        starts = np.concatenate(([0], np.cumsum(spans[:-1, 1])))
        self._staging.device.write(
            [
                Piece(offset, memory[at : at + length])
                for (offset, length), at in zip(spans.tolist(), starts.tolist(), strict=True)
            ]
        )
        self.drop()
        self.at += len(part)
        if self.at < len(self.batch.pages):
            return False
        self._landing.done()
        return True

    def drop(self) -> None:
        """Release the slab, if there is one."""
        if self.slab is not None:
            self._staging.slabs.give(self.slab)
            self.slab = None


class ReceiveBuffers:
    """Write permissions and staged writes of all pools. ``line``: writes that wait for a slab, with their links."""

    def __init__(self, groups: Sequence[PageGroup]) -> None:
        self.pools = [
            GrantedPool(
                number,
                group,
                group.region.view() if group.direct is None else memoryview(b""),
                Grants(group.num_pages),
            )
            for number, group in enumerate(groups)
        ]
        self.line: deque[tuple[Link, StagedWrite]] = deque()
        self._landed: dict[Writer, PageChecksums] = {}

    def note(self, peer: str, handover: HandoverId, landed: PageChecksums) -> None:
        """Record checksums of a hand-over in ``landed``; see ``TransferBackend.note_checksums_in``."""
        self._landed[Writer(peer, handover.room, handover.attempt)] = landed

    def grant(self, peer: str, handover: HandoverId, pages: I32, group: int) -> None:
        """Allow a peer to write pages; see ``TransferBackend.grant``."""
        self.pools[group].grants.grant(Writer(peer, handover.room, handover.attempt), pages)

    def revoke(self, peer: str, handover: HandoverId) -> Writer:
        """Withdraw a permission, and return its writer; see ``TransferBackend.revoke``."""
        writer = Writer(peer, handover.room, handover.attempt)
        self._landed.pop(writer, None)
        for pool in self.pools:
            pool.grants.revoke(writer)
        return writer

    def staged(self, batch: Batch) -> StagedWrite:
        """Return the staged write of a granted batch."""
        return StagedWrite(batch, self._landed[batch.writer])

    def take_slab(self, link: Link, staged: StagedWrite, *, in_turn: bool) -> memoryview | None:
        """Take a slab for ``staged`` and return it, or queue ``staged`` for one and return None.

        ``in_turn``: it is first in line. Otherwise it queues after the writes that wait, so that a large write does not
        hold up others.
        """
        slab = staged.take() if in_turn or not self.line else None
        if slab is None:
            self.line.append((link, staged))
        return slab

    def next_in_line(self) -> tuple[Link, StagedWrite] | None:
        """Remove and return the first write in line, if a slab is free for it."""
        return self.line.popleft() if self.line and self.line[0][1].can_take else None

    def leave(self, link: Link) -> None:
        """Remove the waiting writes of a link that has ended."""
        waiting = [entry for entry in self.line if entry[0] is not link]
        self.line.clear()
        self.line.extend(waiting)

    def close(self) -> None:
        """Release the pools' memory."""
        for pool in self.pools:
            pool.memory.release()
