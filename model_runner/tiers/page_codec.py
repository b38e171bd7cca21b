"""Format of a KV page in the tiers: as in the pool, or with each element rounded to eight bits.

Rounded, a page takes little more than half of bfloat16's memory. What comes back is close to what was computed, not
equal. A block of neighbouring elements has one scale, its largest magnitude over 127, as the KV pool's own int8 has one
for each head and token. The engine's layout decides which elements are neighbours, so every layout can be rounded.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from ...messages.worker import KVGroup, KVLayout
from ...model_files.errors import UnsupportedModel
from ..dtypes import ITEM_BYTES, round_to_bfloat16, widen_bfloat16

Bytes = npt.NDArray[np.uint8]
BLOCKS = (64, 32, 16, 8)
"""Elements with a common scale: the most that divide a page."""
SCALE_BYTES = 4
MOST = 127.0
DTYPES = ("bfloat16", "float16", "float32")
"""Types of elements that can be rounded."""
_SMALLEST = np.finfo(np.float32).tiny


class PageCodec(Protocol):
    """Conversion of pages between pool and tiers. ``nbytes``: bytes of a page in a tier."""

    nbytes: int

    def encode(self, page: Bytes, kept: Bytes) -> None:
        """Convert the KV pool's ``page`` to the tier's form, and write it into ``kept`` (``nbytes`` long)."""

    def decode(self, kept: Bytes, page: Bytes) -> None:
        """Convert ``kept``, the tier's form of a page, back and write it into the KV pool's ``page``."""


class AsItIs:
    """Byte by byte."""

    def __init__(self, page_bytes: int) -> None:
        self.nbytes = page_bytes

    def encode(self, page: Bytes, kept: Bytes) -> None:
        """Copy the pool's ``page`` to ``kept`` unchanged."""
        kept[:] = page

    def decode(self, kept: Bytes, page: Bytes) -> None:
        """Copy ``kept`` to the pool's ``page`` unchanged."""
        page[:] = kept


class Int8:
    """Eight bits an element, then the blocks' scales (float32). ``elements`` of ``dtype`` a page."""

    def __init__(self, elements: int, dtype: str) -> None:
        self._elements, self._dtype = elements, dtype
        self._block = next((block for block in BLOCKS if elements % block == 0), 0)
        if not self._block:
            raise UnsupportedModel(
                f"--hicache-host-dtype int8: a page of {elements} elements has no whole blocks of {BLOCKS[-1]}; "
                "choose another --page-size, or leave the second tier as it is"
            )
        self.nbytes = elements + elements // self._block * SCALE_BYTES

    def encode(self, page: Bytes, kept: Bytes) -> None:
        """Round ``page`` to int8 by blocks, and write the numbers and then the blocks' float32 scales into ``kept``.

        A block of zeros has the scale 0.
        """
        values_BE = self._widen(page).reshape(-1, self._block)
        # A block of zeros has no scale; of what is not finite nothing is promised, and the logits' check finds it.
        with np.errstate(invalid="ignore"):
            scales_B1 = np.abs(values_BE).max(axis=1, keepdims=True) / np.float32(MOST)
            rounded_BE = np.rint(values_BE / np.maximum(scales_B1, _SMALLEST)).astype(np.int8)
        kept[: self._elements] = rounded_BE.reshape(-1).view(np.uint8)
        kept[self._elements :] = scales_B1.reshape(-1).view(np.uint8)

    def decode(self, kept: Bytes, page: Bytes) -> None:
        """Multiply each block of ``kept`` by its scale, and write the elements into ``page`` in the pool's type."""
        values_BE = kept[: self._elements].view(np.int8).astype(np.float32).reshape(-1, self._block)
        scales_B1 = kept[self._elements :].view(np.float32)[:, None]
        with np.errstate(invalid="ignore"):
            page[:] = self._narrow((values_BE * scales_B1).reshape(-1))

    def _widen(self, page: Bytes) -> npt.NDArray[np.float32]:
        """Return a page's elements as float32."""
        if self._dtype == "bfloat16":
            return widen_bfloat16(page.view(np.uint16))
        return page.view(self._dtype).astype(np.float32, copy=False)

    def _narrow(self, values: npt.NDArray[np.float32]) -> Bytes:
        """Return float32 numbers as the bytes of a page, in the pool's type."""
        if self._dtype == "bfloat16":
            return round_to_bfloat16(values).view(np.uint8)
        return values.astype(self._dtype, copy=False).view(np.uint8)


def make_codecs(name: Literal["auto", "int8"], layout: KVLayout) -> list[PageCodec]:
    """Return the codec of each page group, in the layout's order: unchanged bytes for "auto", or rounding to int8.

    ``name``: value of ``--hicache-host-dtype``. Raises ``UnsupportedModel`` for pages that can't be rounded.
    """
    if name == "auto":
        return [AsItIs(group.page_bytes) for group in layout.groups]
    return [_int8_of(group) for group in layout.groups]


def _int8_of(group: KVGroup) -> Int8:
    dtype = group.dtype
    if dtype not in DTYPES or group.scale_dtype is not None:
        raise UnsupportedModel(
            f"--hicache-host-dtype int8: the pool's own pages are {group.dtype}, which is no larger; leave it out, or "
            "--kv-cache-dtype"
        )
    return Int8(group.page_bytes // ITEM_BYTES[dtype], dtype)
