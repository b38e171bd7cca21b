"""Pages of KV, as backends move them: by number, all of their layers or some."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...messages.base import I32, HandoverId, unpack_i32
from ...messages.worker import KVGroup
from ..errors import BadPages
from .direct import Direct
from .region import Region
from .staging import Staging

Spans = npt.NDArray[np.int64]
"""[N, 2]: offset and length in bytes of N pieces of a region."""


class LayerRange(NamedTuple):
    """Layers ``[begin, end)`` of each page."""

    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class PageGroup:
    """Pages of one shape. Page ``i`` is ``page_bytes`` at ``i * page_bytes``: ``num_layers`` equal parts, in order.

    Page 0 belongs to padding, not to any hand-over. ``layers``: what the model calls them, ascending; they are its
    first ones where it is empty.

    ``region`` is the pool itself, on a device where it is ``direct``. One on a device that is not is ``staging``: pages
    are then written to peers from slots, which lie in ``region`` as pages do.
    """

    region: Region
    page_bytes: int
    num_layers: int = 1
    layers: tuple[int, ...] = ()
    staging: Staging | None = None
    direct: Direct | None = None

    @classmethod
    def of(
        cls, group: KVGroup, region: Region, staging: Staging | None = None, direct: Direct | None = None
    ) -> PageGroup:
        """Those of a layout's group."""
        return cls(region, group.page_bytes, group.num_layers, group.layers, staging, direct)

    @property
    def num_pages(self) -> int:
        """Of the pool, page 0 included."""
        return (self.region if self.staging is None else self.staging.device).nbytes // self.page_bytes

    @property
    def num_sources(self) -> int:
        """What ``PageWrite.src`` stays below: pages of the pool, or slots."""
        return self.region.nbytes // self.page_bytes

    def layers_done(self, count: int) -> int:
        """How many of these layers are among the model's first ``count``."""
        return bisect_left(self.layers, count) if self.layers else min(count, self.num_layers)

    def whole(self) -> LayerRange:
        """All layers."""
        return LayerRange(0, self.num_layers)

    def piece_bytes(self, layers: LayerRange) -> int:
        """What is moved of each page."""
        return self.page_bytes // self.num_layers * (layers.end - layers.begin)

    def spans(self, pages: I32, layers: LayerRange) -> Spans:
        """One for each page, where whole pages are neighbours one for all of them."""
        if layers == self.whole():
            return neighbour_spans(pages, pages, self.page_bytes)[0]
        starts = pages.astype(np.int64) * self.page_bytes + self.page_bytes // self.num_layers * layers.begin
        return np.stack((starts, np.full(len(pages), self.piece_bytes(layers))), axis=1)


class PageWrite(NamedTuple):
    """``layers`` of pages ``src`` here (slots, where the pool is on a device), to pages ``dst`` of the peer, for
    ``handover``, whose epoch is the peer's.

    ``number`` counts the writes of a hand-over.
    """

    handover: HandoverId
    number: int
    src: I32
    dst: I32
    layers: LayerRange
    group: int = 0


def unpack_pages(packed: bytes, num_pages: int, what: str) -> I32:
    """Page numbers; raises ``BadPages`` for one that no request can hold."""
    if len(packed) % 4:
        raise BadPages(f"the {what} pages are not int32")
    pages = unpack_i32(packed)
    check_pages(pages, num_pages, what)
    return pages


def check_pages(pages: I32, num_pages: int, what: str) -> None:
    """Raise ``BadPages`` where one of the pages is page 0, or none of the ``num_pages``."""
    if len(pages) and (int(pages.min()) < 1 or int(pages.max()) >= num_pages):
        raise BadPages(f"a {what} page lies outside of 1 … {num_pages - 1}")


def paired_spans(write: PageWrite, group: PageGroup) -> tuple[Spans, Spans]:
    """What ``write`` moves from here and to there, where pages are as ours: equal lengths."""
    if write.layers == group.whole():
        return neighbour_spans(write.src, write.dst, group.page_bytes)
    return group.spans(write.src, write.layers), group.spans(write.dst, write.layers)


def neighbour_spans(src: I32, dst: I32, page_bytes: int) -> tuple[Spans, Spans]:
    """Spans of whole pages ``src`` here and ``dst`` there; those that are neighbours on both sides become one."""
    count = len(src)
    if count == 0:
        return np.empty((0, 2), np.int64), np.empty((0, 2), np.int64)
    # Called for every slice: without numpy's conveniences, which take several times as long as what they do.
    begins = np.empty(count, np.bool_)
    begins[0] = True
    begins[1:] = src[1:] - src[:-1] != 1
    if dst is not src:
        begins[1:] |= dst[1:] - dst[:-1] != 1
    starts = begins.nonzero()[0]
    local, remote = np.empty((len(starts), 2), np.int64), np.empty((len(starts), 2), np.int64)
    local[:, 0], remote[:, 0] = src[starts], dst[starts]
    local[:-1, 1] = starts[1:] - starts[:-1]
    local[-1, 1] = count - starts[-1]
    local *= page_bytes
    remote[:, 0] *= page_bytes
    remote[:, 1] = local[:, 1]
    return local, remote
