"""A checksum of pages that a device computes where they lie, and a host too.

xxh3 of a slice (``SliceChecksum``) is a chain over its bytes: a device's thousands of programs could not share it. This
one is a sum, modulo 2^64, of a mixed word for each 8 bytes of the slice: splitmix64's mixer (``inverse_cdf.py``) of the
word plus its place times the golden ratio. A sum has no order, so programs and pages divide it as they like.

What it tells:
- every change within one aligned word, of however many bits: the mixer is one to one, so one term differs;
- other changes (words swapped, shifted, pages in another order, several words wrong), unless the sums of differences
  meet in 64 bits: 1 in 2^64 for differences that do not know the mixer.
It is against faults of memory and transport, as xxh3 is, and no help against who wants to deceive.

Shapes: N pages, all of their layers or some.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from ...disaggregation.transfer.pages import LayerRange
from ..inverse_cdf import GOLDEN as GOLDEN_RATIO
from ..inverse_cdf import mix as mix_words
from .draw_math import GOLDEN, mix

WORD_BYTES = 8
_BLOCK = 4096
_BATCH = 1 << 16


def page_checksum(pool: Tensor, pages: Tensor, layers: LayerRange, num_layers: int, out: Tensor) -> None:
    """Write the checksum of ``layers`` of ``pages`` ([N] int32 or int64), page by page in this order, to ``out``.

    ``pool``: any type, contiguous, its first dimension the pages, which have ``num_layers`` equal parts of a multiple
    of 8 bytes. ``out``: [1] int64, the checksum's bits (two launches).
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


def host_checksum(data: npt.NDArray[np.uint8], first_word: int = 0) -> int:
    """The same of bytes that lie side by side, a multiple of 8 of them; ``first_word``: where they begin in the slice.

    Sums of parts are added up modulo 2^64.
    """
    words = data.view(np.uint64)
    total = np.uint64(0)
    with np.errstate(over="ignore"):
        for begin in range(0, len(words), _BATCH):
            part = words[begin : begin + _BATCH]
            places = np.arange(first_word + begin + 1, first_word + begin + 1 + len(part), dtype=np.uint64)
            total += mix_words(part + places * GOLDEN_RATIO).sum(dtype=np.uint64)
    return int(total)


def _words(page_bytes: int, num_layers: int) -> int:
    if page_bytes % (num_layers * WORD_BYTES):
        raise ValueError(f"{num_layers} parts of a page of {page_bytes} bytes are no multiples of {WORD_BYTES} bytes")
    return page_bytes // num_layers // WORD_BYTES


@triton.jit
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
