"""Pages of KV between the pool on a device and one contiguous buffer, which may be the host's pinned memory.

Pages of a request lie anywhere in the pool, but one run of them crosses the bus, with all of their layers or some. That
takes one launch each way. The contents of pages are not interpreted, so any kind of pool will do.

Orders: pages that go to an engine that keeps another order (``mem_cache/kv_pages/page_order.py``) are permuted on
the way. Which unit comes where is the same in each layer of a page, and is found by asking ``PageConverter`` itself.

Shapes: N pages, L layers of a page, U units of a layer.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ....mem_cache.kv_pages.page_group import LayerRange
from ....mem_cache.kv_pages.page_order import PageConverter
from ....messages.worker import KVLayout, KVOrder

_BLOCK = 2048


def gather_pages(
    pool: Tensor, pages: Tensor, layers: LayerRange, num_layers: int, staging: Tensor, units: Tensor | None = None
) -> None:
    """Queue the copy of ``layers`` of ``pages`` ([N] int32 or int64) from the pool to ``staging``, one after another.

    ``pool``: any type, contiguous; its first dimension is pages, each of ``num_layers`` equal parts. ``staging``:
    contiguous memory to fill. ``units``: permutation from ``order_units``, by which each layer's part is put into
    another order; None: none. Raises ``ValueError`` if ``staging`` is too small.
    """
    _move(pool, pages, layers, num_layers, staging, units, is_gather=True)


def scatter_pages(
    pool: Tensor, pages: Tensor, layers: LayerRange, num_layers: int, staging: Tensor, units: Tensor | None = None
) -> None:
    """Queue the copy of ``staging`` to ``layers`` of ``pages`` in the pool, the reverse of ``gather_pages``.

    ``units``: permutation from the order of ``staging`` to the pool's; None: none.
    """
    _move(pool, pages, layers, num_layers, staging, units, is_gather=False)


def order_units(layout: KVLayout, source: KVOrder, group: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return the permutation [U] that brings a layer's part of a page from the order ``source`` to that of ``layout``.

    A unit is an element, or a byte if elements have scales. Raises ``ValueError`` if there is one order only.
    """
    kept = layout.groups[group]
    one = msgspec.structs.replace(kept, layers=kept.layers[:1], page_bytes=kept.page_bytes // kept.num_layers)
    converter = PageConverter(msgspec.structs.replace(layout, groups=(one,)), source)
    unit = unit_bytes(layout, group)
    numbers = np.arange(one.page_bytes // unit, dtype=np.int32)
    found = np.zeros(len(numbers), dtype=np.int32)
    for byte in range(3):  # units are told apart by what they hold, a byte of their numbers at a time
        page = np.repeat((numbers >> (8 * byte)).astype(np.uint8), unit)
        converter.convert(page)
        found |= page[::unit].astype(np.int32) << (8 * byte)
    return found


def unit_bytes(layout: KVLayout, group: int = 0) -> int:
    """Return the bytes of a unit, the smallest piece that moves as a whole when the order of a page changes.

    It is one element, or one byte if the group's elements have scales. ``group``: index of the layout's page group.
    """
    kept = layout.groups[group]
    return 1 if kept.scale_dtype is not None else int(getattr(torch, kept.dtype).itemsize)


def _move(
    pool: Tensor,
    pages: Tensor,
    layers: LayerRange,
    num_layers: int,
    staging: Tensor,
    units: Tensor | None,
    *,
    is_gather: bool,
) -> None:
    count = len(pages)
    if count == 0:
        return
    page_bytes = pool.nbytes // len(pool)
    layer_bytes = page_bytes // num_layers
    piece_bytes = layer_bytes * (layers.end - layers.begin)
    if count * piece_bytes > staging.nbytes:
        raise ValueError(f"{count} pieces of {piece_bytes} bytes do not fit into {staging.nbytes}")
    width = _widest(layer_bytes) if units is None else layer_bytes // len(units)
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    piece = piece_bytes // width
    _move_pages[(count, triton.cdiv(piece, _BLOCK))](
        pool.view(-1).view(word),
        pages,
        staging.view(-1).view(word),
        units,
        page_bytes // width,
        layer_bytes // width * layers.begin,
        piece,
        layer_bytes // width,
        GATHER=is_gather,
        BLOCK=_BLOCK,
        num_warps=8,
    )


def _widest(nbytes: int) -> int:
    return next(width for width in (8, 4, 2, 1) if nbytes % width == 0)


@triton.jit
def _move_pages(
    pool_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    staging_ptr: tl.tensor,
    units_ptr: tl.tensor,
    page_words: tl.tensor,
    first: tl.tensor,
    piece: tl.tensor,
    layer: tl.tensor,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < piece
    come_from = at
    if units_ptr is not None:
        come_from = at // layer * layer + tl.load(units_ptr + at % layer, mask=is_in, other=0)
    in_pool = pool_ptr + tl.load(pages_ptr + i).to(tl.int64) * page_words + first
    in_staging = staging_ptr + i * piece
    if GATHER:
        tl.store(in_staging + at, tl.load(in_pool + come_from, mask=is_in), mask=is_in)
    else:
        tl.store(in_pool + at, tl.load(in_staging + come_from, mask=is_in), mask=is_in)
