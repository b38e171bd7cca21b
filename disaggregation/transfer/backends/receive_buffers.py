"""What lands here by the word of its writer: who may write which pages, and how those of a device pass by slabs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ....messages.base import I32, HandoverId
from ..page_checksums import PageChecksums
from ..pages import LayerRange, PageGroup
from ..staging import Piece
from .grants import Grants, Writer

if TYPE_CHECKING:
    from .link import Link

PAGE_NUMBER = np.dtype("<i4")
MAX_PAGES = 1 << 16
MAX_BATCH_BYTES = 1 << 30
"""Of a batch, as both of its ends hold it."""


class GrantedPool(NamedTuple):
    """A group of pages that peers write; ``number``: of it, for the backend. ``memory``: empty for a pool on a device
    that they write themselves.
    """

    number: int
    group: PageGroup
    memory: memoryview
    grants: Grants


class Batch(NamedTuple):
    """Pages that a peer wants to write. ``number``: what it calls them."""

    number: int
    writer: Writer
    pool: GrantedPool
    layers: LayerRange
    pages: npt.NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return len(self.pages) * self.pool.group.piece_bytes(self.layers)

    @property
    def is_granted(self) -> bool:
        """Whether they may be written now."""
        return self.pool.grants.covers(self.writer, self.pages)


class StagedWrite:
    """A batch whose pages pass through slabs, one slab at a time; ``at`` of them are on the device."""

    def __init__(self, batch: Batch, landed: PageChecksums) -> None:
        """``landed``: where to note what has come."""
        group = batch.pool.group
        assert group.staging is not None
        self.batch = batch
        self.slab: memoryview | None = None
        self.at = 0
        self._staging = group.staging
        self._landing = landed.landing(group, batch.pool.number, batch.layers, batch.pages)

    @property
    def can_take(self) -> bool:
        """Whether there is a slab to be had."""
        return self._staging.slabs.free > 0

    def take(self) -> bool:
        """Take a slab; False where there is none."""
        self.slab = self._staging.slabs.take()
        return self.slab is not None

    @property
    def part(self) -> I32:
        """The next pages, as many as a slab takes."""
        count = self._staging.slabs.slab_bytes // self.batch.pool.group.piece_bytes(self.batch.layers)
        return self.batch.pages[self.at : self.at + count]

    @property
    def memory(self) -> memoryview:
        """Of the slab, what they fill."""
        assert self.slab is not None
        return self.slab[: len(self.part) * self.batch.pool.group.piece_bytes(self.batch.layers)]

    def land(self) -> bool:
        """The slab is filled: bring its pages to the device, and give it back; returns whether these were the last."""
        part, memory = self.part, self.memory
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
        """Nobody fills the slab any more, if there is one."""
        if self.slab is not None:
            self._staging.slabs.give(self.slab)
            self.slab = None


class ReceiveBuffers:
    """Of all pools of an instance. ``line``: what waits for a slab, and by which link it comes."""

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
        """Where to note what comes for a hand-over, as ``TransferBackend.note_checksums_in``."""
        self._landed[Writer(peer, handover.room, handover.attempt)] = landed

    def grant(self, peer: str, handover: HandoverId, pages: I32, group: int) -> None:
        """As ``TransferBackend.grant``."""
        self.pools[group].grants.grant(Writer(peer, handover.room, handover.attempt), pages)

    def revoke(self, peer: str, handover: HandoverId) -> Writer:
        """As ``TransferBackend.revoke``; returns who may write nothing any more."""
        writer = Writer(peer, handover.room, handover.attempt)
        self._landed.pop(writer, None)
        for pool in self.pools:
            pool.grants.revoke(writer)
        return writer

    def staged(self, batch: Batch) -> StagedWrite:
        """Of a batch that is granted."""
        return StagedWrite(batch, self._landed[batch.writer])

    def take_slab(self, link: Link, staged: StagedWrite, *, in_turn: bool) -> bool:
        """Take one for a staged; or have it wait for one: also where others do, unless it is its turn, so that none
        is held up by one that has much to write.
        """
        if (in_turn or not self.line) and staged.take():
            return True
        self.line.append((link, staged))
        return False

    def next_in_line(self) -> tuple[Link, StagedWrite] | None:
        """Whose turn it is, where there is a slab for it."""
        return self.line.popleft() if self.line and self.line[0][1].can_take else None

    def leave(self, link: Link) -> None:
        """Nothing comes by this link any more."""
        waiting = [entry for entry in self.line if entry[0] is not link]
        self.line.clear()
        self.line.extend(waiting)

    def close(self) -> None:
        """Let go of the pools' memory."""
        for pool in self.pools:
            pool.memory.release()
