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
        """Whether the hand-over may write all of the pages now."""
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
        """Take a free slab for this write, and return it; None if none is free."""
        self.slab = self._staging.slabs.take()
        return self.slab

    @property
    def part(self) -> I32:
        """Pages that come next, as many as fit into a slab."""
        count = self._staging.slabs.slab_bytes // self.batch.pool.group.piece_bytes(self.batch.layers)
        return self.batch.pages[self.at : self.at + count]

    def filled(self, slab: memoryview) -> memoryview:
        """Return the first part of ``slab`` that the next pages fill."""
        return slab[: len(self.part) * self.batch.pool.group.piece_bytes(self.batch.layers)]

    def land(self, slab: memoryview) -> bool:
        """Copy the pages in the filled slab to the device, and free the slab. Return whether the batch is complete.

        Their checksums are taken first.
        """
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
        """Free the slab, if this write has one."""
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
        """Have the checksums of all pages that ``peer`` writes for ``handover`` recorded in ``landed``."""
        self._landed[Writer(peer, handover.room, handover.attempt)] = landed

    def grant(self, peer: str, handover: HandoverId, pages: I32, group: int) -> None:
        """Allow ``peer``, and no other peer, to write ``pages`` of pool ``group`` for ``handover``."""
        self.pools[group].grants.grant(Writer(peer, handover.room, handover.attempt), pages)

    def revoke(self, peer: str, handover: HandoverId) -> Writer:
        """End the permission of ``peer`` to write pages of any pool for ``handover``, and return the key of that
        writer.
        """
        writer = Writer(peer, handover.room, handover.attempt)
        self._landed.pop(writer, None)
        for pool in self.pools:
            pool.grants.revoke(writer)
        return writer

    def staged(self, batch: Batch) -> StagedWrite:
        """Make the staged write of a granted batch, which passes through slabs to the device. It has no slab yet."""
        return StagedWrite(batch, self._landed[batch.writer])

    def take_slab(self, link: Link, staged: StagedWrite, *, in_turn: bool) -> memoryview | None:
        """Take a slab for ``staged`` and return it. If none may be taken, queue ``staged`` for one and return None.

        ``in_turn``: it is the first of those that wait. Otherwise it queues after them, so that a large write does not
        hold up others.
        """
        slab = staged.take() if in_turn or not self.line else None
        if slab is None:
            self.line.append((link, staged))
        return slab

    def next_in_line(self) -> tuple[Link, StagedWrite] | None:
        """Remove and return the write that has waited longest for a slab, with its link; None if no slab is free or
        none waits.
        """
        return self.line.popleft() if self.line and self.line[0][1].can_take else None

    def leave(self, link: Link) -> None:
        """Remove the writes of ``link``, which has ended, from those that wait for a slab."""
        waiting = [entry for entry in self.line if entry[0] is not link]
        self.line.clear()
        self.line.extend(waiting)

    def close(self) -> None:
        """Release the views of the pools' memory; the pools themselves stay."""
        for pool in self.pools:
            pool.memory.release()
