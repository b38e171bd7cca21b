"""KV pages as backends move them: by page number, with all of their layers or some."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...messages.base import I32
from ...messages.worker import KVGroup
from .direct import Direct
from .region import Region
from .staging import Staging

Spans = npt.NDArray[np.int64]
"""Array [N, 2] with the offset and length in bytes of N pieces of a region."""


class LayerRange(NamedTuple):
    """Layers ``[begin, end)`` of each page."""

    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class PageGroup:
    """Pages of one shape. Page ``i`` begins at ``i * page_bytes`` and has ``num_layers`` equal parts, in order.

    Page 0 belongs to padding, not to any hand-over. ``layers`` are the model's numbers of these layers, ascending. If
    it is empty, they are the model's first layers.

    Without ``staging``, ``region`` is the pool itself, which is on a device if ``direct`` is set. With ``staging``, the
    pool is on a device and pages are written to peers from slots, which lie in ``region`` like pages.
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
        """Make the page group of the layout's group ``group``, with the model's layers that it has, in ``region``.

        ``staging`` or ``direct`` is set if the pool is on a device.
        """
        return cls(region, group.page_bytes, group.num_layers, group.layers, staging, direct)

    @property
    def num_pages(self) -> int:
        """Number of pages in the pool, including page 0."""
        return (self.region if self.staging is None else self.staging.device).nbytes // self.page_bytes

    @property
    def num_sources(self) -> int:
        """Upper bound (exclusive) of ``PageWrite.src``: number of pages in the region.

        They are the pool's pages, page 0 included, or with ``staging`` the host's slots for sending, slot 0 included.
        """
        return self.region.nbytes // self.page_bytes

    def layers_done(self, count: int) -> int:
        """Return how many of this group's layers are computed when the model's first ``count`` are."""
        return bisect_left(self.layers, count) if self.layers else min(count, self.num_layers)

    def whole(self) -> LayerRange:
        """Return the range of all layers."""
        return LayerRange(0, self.num_layers)

    def piece_bytes(self, layers: LayerRange) -> int:
        """Return the bytes of ``layers`` of one page."""
        return self.page_bytes // self.num_layers * (layers.end - layers.begin)

    def spans(self, pages: I32, layers: LayerRange) -> Spans:
        """Return where ``layers`` of ``pages`` lie in the region: one span (offset, length in bytes) for each page.

        If they are all layers, neighbouring pages share one span.
        """
        if layers == self.whole():
            return neighbour_spans(pages, pages, self.page_bytes)[0]
        starts = pages.astype(np.int64) * self.page_bytes + self.page_bytes // self.num_layers * layers.begin
        return np.stack((starts, np.full(len(pages), self.piece_bytes(layers))), axis=1)


def neighbour_spans(src: I32, dst: I32, page_bytes: int) -> tuple[Spans, Spans]:
    """Return two arrays of spans (offset, length in bytes): of the whole pages ``src`` in our region, and of ``dst`` in
    the peer's pool.

    Both have as many rows. Pages that are neighbours on both sides share one span.
    """
    count = len(src)
    if count == 0:
        return np.empty((0, 2), np.int64), np.empty((0, 2), np.int64)
    # This runs for every slice, so it avoids numpy's convenience functions: their overhead is several times the work.
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
