"""How a library that writes one-sidedly fills slabs of the owner's host memory, where the owner's pool is on a device.

Neither the library nor the owner can tell where in a slab what ends, so both say it on the lease, beside the library
(``wishes.py``): the owner's leave is a slab for some of the pages. What has been written there it hashes, brings into
our order and copies to the device; then comes the next slab, or the batch has landed.

Several batches may be under way, each with a slab at a time. A batch that waits for one holds none, so that however
little memory there is, everything moves on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ...errors import LinkLost
from ..pages import PageGroup, Spans
from ..staging import Slabs
from .landings import Batch, Landings, Passage
from .link import Link
from .wishes import Kind, Wish, WishReader, WishWriter


class Filler(Protocol):
    """The library's end that fills slabs; see ``leased_backend.Courier``."""

    def fill(self, group: int, spans: Spans, there: int) -> Any:
        """Begin to write pieces of a pool of ours, one behind the other, to an address of the peer's."""
        ...

    def has_landed(self, write: Any) -> bool:
        """Whether every byte is there."""
        ...


class SlabReader(WishReader):
    """The owner's end of one link."""

    def __init__(self, link: Link, landings: Landings, slabs: Slabs, stall_seconds: float) -> None:
        super().__init__(link, landings, stall_seconds)
        self._slabs = slabs
        self._passing: dict[int, Passage] = {}

    @property
    def _is_owed(self) -> bool:
        return any(passage.slab is not None for passage in self._passing.values())

    def _begin(self, batch: Batch) -> None:
        self._passing[batch.number] = passage = self._landings.passage(batch)
        self.next_slab(passage)

    def next_slab(self, passage: Passage, *, in_turn: bool = False) -> None:
        """Tell the writer of a slab for its next pages, or wait for one."""
        if self._landings.take_slab(self._link, passage, in_turn=in_turn):
            assert passage.slab is not None
            self._give_leave(Kind.SLAB, passage.batch, self._slabs.offset_of(passage.slab), len(passage.part))

    def close(self) -> None:
        """Give back all that is held."""
        super().close()
        self._landings.leave(self._link)
        for passage in self._passing.values():
            passage.drop()
        self._passing.clear()

    def _on_written(self, batch: Batch) -> bool:
        passage = self._passing[batch.number]
        if passage.slab is None:
            raise LinkLost("the peer filled what it was not given")
        if passage.land():
            del self._passing[batch.number]
            return True
        self.next_slab(passage)
        return False


class SlabWriter(WishWriter):
    """The writer's end of one link."""

    leave = Kind.SLAB

    def __init__(self, link: Link, courier: Filler, groups: Sequence[PageGroup], address: int, nbytes: int) -> None:
        """``address``, ``nbytes``: of all slabs, in the owner's process."""
        super().__init__(link, courier, groups)
        self._courier = courier
        self._address = address
        self._nbytes = nbytes

    def _start(self, wish: Wish, place: int, count: int) -> Any:
        group, pages = self._groups[wish.pages.group], wish.pages
        if place + count * group.piece_bytes(pages.layers) > self._nbytes:
            raise LinkLost("the peer offers a slab that it does not have")
        spans = group.spans(pages.src[wish.at : wish.at + count], pages.layers)
        return self._courier.fill(pages.group, spans, self._address + place)
