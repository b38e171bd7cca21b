"""KV pages of one order made into those of another, bit for bit.

Shapes: L layers, S slots of a page, K KV heads, D head_dim; G elements to a word; b slots to a block, n blocks.

    tokens   [L, 2, S, K, D]                                    torch, on every device
    blocks   [L, keys, K, n, D / G, b, G], [L, values, K, n, b / G, D, G]    the CPU engine (cpu_engine/src/kv_blocks.h)

Latent rows (kind "mla") are keys of one head without values: [L, S, D] and [L, n, D / G, b, G].
G is 2, for elements of four bytes 1. b is 16, or S where that is less; where b < G (one slot) values lie as
[L, values, K, n, D]. Elements of one byte have scales: each D in "tokens" is followed by one, and each block in
"blocks" by its b, of keys and of values.
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
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}
_SCALE_BYTES = {"float32": 4}

Page = npt.NDArray[np.uint8]
_Views = list[npt.NDArray[Any]]


def can_exchange(ours: KVLayout, theirs: KVLayout) -> bool:
    """Return whether pages of one layout can be converted into pages of the other, exactly.

    That is so if the layouts are equal, or differ only in the order of a page's bytes and that order is convertible.
    """
    if ours == theirs:
        return True
    return msgspec.structs.replace(theirs, order=ours.order) == ours and _is_convertible(ours)


def _is_convertible(layout: KVLayout) -> bool:
    size = layout.page_size
    blocks = size % BLOCK_SLOTS == 0 or BLOCK_SLOTS % size == 0
    return blocks and all(_has_whole_words(group) for group in layout.groups)


def _has_whole_words(group: KVGroup) -> bool:
    item = _ITEM_BYTES.get(group.dtype, 0)
    if item == 0 or (group.scale_dtype is not None and group.scale_dtype not in _SCALE_BYTES):
        return False
    if group.kind == "sparse" or (group.kind == "mla" and group.scale_dtype is not None):
        return False  # which only torch reads
    return group.head_dim % _together(item) == 0 and group.head_dim * item % max(_scale_bytes(group), 1) == 0


class PageConverter:
    """Conversion of a group's pages from the order ``source`` into the order of ``layout``, in place.

    It takes the memory of one page. Raises ``ValueError`` for a layout with pages of an unknown order.
    """

    def __init__(self, layout: KVLayout, source: KVOrder, group: int = 0) -> None:
        if not _is_convertible(layout):
            raise ValueError(f"pages of {layout} have one order only")
        self._group, self._page_size, self._order = layout.groups[group], layout.page_size, layout.order
        self._copy = np.empty(self._group.page_bytes, dtype=np.uint8)
        self._from = _views(self._copy, self._group, self._page_size, source)

    def convert(self, page: Page) -> None:
        """Convert one page in place, from the order ``source`` to that of ``layout``.

        Both are the constructor's arguments.
        ``page``: a contiguous uint8 array of the group's ``page_bytes`` bytes.
        """
        self._copy[:] = page
        for to, source in zip(_views(page, self._group, self._page_size, self._order), self._from, strict=True):
            np.copyto(to, source)


def _views(page: Page, group: KVGroup, size: int, order: KVOrder) -> _Views:
    """Return views of a page's keys (or latent rows) as words, of its values as elements, and of its scales if any.

    Their axes are those of "blocks". Values come as one view for each slot of a row. With all slots in one view the
    last axis would have two elements, which numpy copies slowly.
    """
    layers, heads, dim = group.num_layers, group.kv_heads, group.head_dim
    item, scale = _ITEM_BYTES[group.dtype], _scale_bytes(group)
    together, slots = _together(item), min(size, BLOCK_SLOTS)
    count = size // slots
    if group.kind == "mla":
        words = page.view(f"u{item * together}")
        if order == "blocks":
            return [words.reshape(layers, count, dim // together, slots)]
        return [words.reshape(layers, count, slots, dim // together).swapaxes(2, 3)]
    # A block of fewer slots than a word has elements: rows are of slots then, not of groups of them.
    group_of_slots = min(together, slots)
    rows = slots // group_of_slots
    width, word, element = dim * item + scale, f"u{item * together}", f"u{item}"
    if order == "blocks":
        blocks = page.reshape(layers, 2, heads, count, slots * width)
        elements = blocks[..., : slots * dim * item]
        keys = _as(elements[:, 0], word, (dim // together, slots))
        values = _as(elements[:, 1], element, (rows, dim, group_of_slots))
        scales = [_as(blocks[..., slots * dim * item :], f"u{scale}", (slots,))] if scale else []
    else:
        tokens = page.reshape(layers, 2, count, slots, heads, width)
        elements = tokens[..., : dim * item]
        keys = _as(elements[:, 0], word, (dim // together,)).transpose(0, 3, 1, 4, 2)
        split = elements[:, 1].reshape(layers, count, rows, group_of_slots, heads, dim * item)
        values = _as(split, element, (dim,)).transpose(0, 4, 1, 2, 5, 3)
        scales = [_as(tokens[..., dim * item :], f"u{scale}", ()).transpose(0, 1, 4, 2, 3)] if scale else []
    return [keys, *np.moveaxis(values, -1, 0), *scales]


def _as(pieces: Page, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """View each of the pieces along the last axis as ``shape`` of ``dtype``."""
    return pieces.view(dtype).reshape(*pieces.shape[:-1], *shape)


def _together(item: int) -> int:
    """Return how many elements of ``item`` bytes the order "blocks" keeps side by side in one word."""
    return 1 if item == _WORD_BYTES else 2


def _scale_bytes(group: KVGroup) -> int:
    """Return the bytes of the scale of one head of a token, 0 if elements have no scale."""
    return 0 if group.scale_dtype is None else _SCALE_BYTES[group.scale_dtype]
