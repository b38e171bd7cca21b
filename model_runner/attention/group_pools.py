"""The pools that layers read and write: one for each page group of the layout, with a pass's pages in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..batch.forward_batch import ForwardBatch
from ..kv.pool import KVPool


class FullPool:
    """The pool of the layers that keep their pages, which are those of the request table."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool

    def slots(self, batch: ForwardBatch) -> Tensor:
        """Return the slots of this pool that the pass writes: int64 [T]."""
        return batch.out_cache_loc

    def pages(self, batch: ForwardBatch, pages: Tensor) -> Tensor:
        """Return this pool's pages for ``pages``, page numbers of the request table: the same."""
        return pages

    def seen_pages(self, batch: ForwardBatch, pages: Tensor, seen_by_first: Tensor | int) -> Tensor:
        """Return ``pages`` (int64 [..., P], in the order of positions) as page numbers of this pool: here, unchanged.

        ``seen_by_first``: tokens that the first query sees, its own included; this pool ignores it. A window pool puts
        page 0 in place of pages that no query sees.
        """
        return pages


class WindowPool(FullPool):
    """The pool of the layers that attend to a window. ``ForwardBatch.window_pages`` leads to its pages."""

    def slots(self, batch: ForwardBatch) -> Tensor:
        """Return the slots of the window pool that the pass writes, int64 [T].

        They lie in other pages than those of the request table, at the same offsets within them.
        """
        slots, size = batch.out_cache_loc, self.pool.layout.page_size
        return self.pages(batch, slots // size).to(torch.int64) * size + slots % size

    def pages(self, batch: ForwardBatch, pages: Tensor) -> Tensor:
        """Return the window pool's pages for these pages of the request table, int32; 0 where there is none."""
        assert batch.window_pages is not None
        return batch.window_pages[pages.long()]

    def seen_pages(self, batch: ForwardBatch, pages: Tensor, seen_by_first: Tensor | int) -> Tensor:
        """Return ``pages`` (int64 [..., P], in the order of positions) as page numbers of the window pool.

        ``seen_by_first``: tokens up to the first query, its own included. Pages wholly before that query's window
        become page 0, as no query sees them.
        """
        # Before the window a row may have no page, or one that belongs to another row now.
        end = (torch.arange(pages.shape[-1], device=pages.device) + 1) * self.pool.layout.page_size
        is_seen = end > seen_by_first - self.pool.group.window
        return torch.where(is_seen, self.pages(batch, pages).to(torch.int64), 0)


def group_pools(pools: Sequence[KVPool]) -> list[FullPool]:
    """Wrap the pools of the layout's groups: the one of full attention, then the one of windows if there is one."""
    return [FullPool(pools[0]), *map(WindowPool, pools[1:])]


def groups_of_layers(pools: Sequence[KVPool]) -> dict[int, int]:
    """Return the index of the page group of each layer, by the layer's number in the model."""
    return {layer: number for number, pool in enumerate(pools) for layer in pool.group.layers}
