"""The checksum of ``mem_cache/kv_pages/word_sum.py``, of pages that lie on a device.

Shapes: N pages, all of their layers or some.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....mem_cache.kv_pages.page_group import LayerRange
from ....mem_cache.kv_pages.word_sum import WORD_BYTES
from ...ops.triton.splitmix import GOLDEN, mix

_BLOCK = 4096


def page_checksum(pool: Tensor, pages: Tensor, layers: LayerRange, num_layers: int, out: Tensor) -> None:
    """Queue the computation of the checksum of ``layers`` of ``pages`` ([N] int32 or int64).

    It is written to ``out`` [1] int64, as bits. The order of pages matters. ``pool``: any type, contiguous; its first
    dimension is pages, each of ``num_layers`` equal parts of a multiple of 8 bytes. Raises ``ValueError`` if parts are
    no such multiple.
    """
    page_bytes = pool.nbytes // len(pool)
    words = _words(page_bytes, num_layers)
    out.zero_()
    piece = words * (layers.end - layers.begin)
    if len(pages) and piece:
        _page_checksum[(len(pages), triton.cdiv(piece, _BLOCK))](
            pool.view(-1).view(torch.int64),
            pages,
            out,
            page_bytes // WORD_BYTES,
            words * layers.begin,
            piece,
            BLOCK=_BLOCK,
            num_warps=8,
        )


def _words(page_bytes: int, num_layers: int) -> int:
    if page_bytes % (num_layers * WORD_BYTES):
        raise ValueError(f"{num_layers} parts of a page of {page_bytes} bytes are no multiples of {WORD_BYTES} bytes")
    return page_bytes // num_layers // WORD_BYTES


# Slices differ in their layers, and the engine's thread is to compile nothing.
@triton.jit(do_not_specialize=["page_words", "first", "piece"])
def _page_checksum(
    pool_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    out_ptr: tl.tensor,
    page_words: tl.tensor,
    first: tl.tensor,
    piece: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    i = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words_ptr = pool_ptr + tl.load(pages_ptr + i).to(tl.int64) * page_words + first
    words = tl.load(words_ptr + at, mask=at < piece, other=0).to(tl.uint64, bitcast=True)
    place = (i * piece + at + 1).to(tl.uint64)
    mixed = mix(words + place * GOLDEN).to(tl.int64, bitcast=True)
    tl.atomic_add(out_ptr, tl.sum(tl.where(at < piece, mixed, 0), 0), sem="relaxed")
