"""KV pages of one order made into those of another, bit for bit.

Shapes: L layers, S slots of a page, K KV heads, D head_dim; G elements to a 32-bit word; b slots to a block, n blocks.

    tokens   [L, 2, S, K, D]                                    torch, on every device
    blocks   [L, keys, K, n, D / G, b, G], [L, values, K, n, b / G, D, G]    the CPU engine (kernels/cpu/kv_blocks.h)

Latent rows (kind "mla") are keys of one head without values: [L, S, D] and [L, n, D / G, b, G].
b is 16, or S where that is less; where b < G (one slot of two bytes an element) values lie as [L, values, K, n, D].
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ...messages.worker import KVGroup, KVLayout, KVOrder

BLOCK_SLOTS = 16
"""``kBlockSlots`` of kv_blocks.h."""
_WORD_BYTES = 4
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Page = npt.NDArray[np.uint8]
_Views = list[npt.NDArray[Any]]


def can_exchange(ours: KVLayout, theirs: KVLayout) -> bool:
    """Whether pages of one layout can become pages of the other: they are equal, or differ in their order only."""
    if ours == theirs:
        return True
    return msgspec.structs.replace(theirs, order=ours.order) == ours and _is_convertible(ours)


def _is_convertible(layout: KVLayout) -> bool:
    size = layout.page_size
    blocks = size % BLOCK_SLOTS == 0 or BLOCK_SLOTS % size == 0
    items = [_ITEM_BYTES.get(group.dtype, 0) for group in layout.groups]
    whole = all(group.head_dim * item % _WORD_BYTES == 0 for group, item in zip(layout.groups, items, strict=True))
    return blocks and whole and all(items)


class PageConverter:
    """Brings pages of a group of ``layout`` that lie in the order ``source`` into the layout's own order, in place.

    Takes the memory of one page. Raises ``ValueError`` for a layout whose pages it doesn't know.
    """

    def __init__(self, layout: KVLayout, source: KVOrder, group: int = 0) -> None:
        if not _is_convertible(layout):
            raise ValueError(f"pages of {layout} have one order only")
        self._group, self._page_size, self._order = layout.groups[group], layout.page_size, layout.order
        self._copy = np.empty(self._group.page_bytes, dtype=np.uint8)
        self._from = _views(self._copy, self._group, self._page_size, source)

    def convert(self, page: Page) -> None:
        """Convert one page, ``page_bytes`` contiguous bytes."""
        self._copy[:] = page
        for to, source in zip(_views(page, self._group, self._page_size, self._order), self._from, strict=True):
            np.copyto(to, source)


def _views(page: Page, group: KVGroup, size: int, order: KVOrder) -> _Views:
    """A page's keys (or latent rows) as words, and its values as elements, with their axes as "blocks" has them.

    Values come as one view for each slot of a row: their last axis is of two elements, and numpy is slow at copying so
    few at a time.
    """
    layers, heads, dim = group.num_layers, group.kv_heads, group.head_dim
    item = _ITEM_BYTES[group.dtype]
    together, slots = _WORD_BYTES // item, min(size, BLOCK_SLOTS)
    count, words, elements = size // slots, page.view(np.uint32), page.view(f"u{item}")
    # A block of fewer slots than a word has elements: rows are of slots then, not of groups of them.
    if group.kind == "mla":
        if order == "blocks":
            return [words.reshape(layers, count, dim // together, slots)]
        return [words.reshape(layers, count, slots, dim // together).swapaxes(2, 3)]
    group_of_slots = min(together, slots)
    rows = slots // group_of_slots
    if order == "blocks":
        keys = words.reshape(layers, 2, heads, count, dim // together, slots)[:, 0]
        values = elements.reshape(layers, 2, heads, count, rows, dim, group_of_slots)[:, 1]
        return [keys, *np.moveaxis(values, -1, 0)]
    keys = words.reshape(layers, 2, count, slots, heads, dim // together)[:, 0].transpose(0, 3, 1, 4, 2)
    values = elements.reshape(layers, 2, count, rows, group_of_slots, heads, dim)[:, 1].transpose(0, 4, 1, 2, 5, 3)
    return [keys, *np.moveaxis(values, -1, 0)]
