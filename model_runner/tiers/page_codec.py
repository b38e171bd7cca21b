"""Format of a KV page in the tiers: as in the pool, or with each element rounded to eight bits.

Rounded, a page takes little more than half of bfloat16's memory. What comes back is close to what was computed, not
equal. A block of neighbouring elements has one scale, its largest magnitude over 127, as the KV pool's own int8 has one
for each head and token. The engine's layout decides which elements are neighbours, so every layout can be rounded.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ...messages.worker import KVGroup, KVLayout
from ...model_files.errors import UnsupportedModel

Bytes = npt.NDArray[np.uint8]
BLOCKS = (64, 32, 16, 8)
"""Elements with a common scale: the most that divide a page."""
SCALE_BYTES = 4
MOST = 127.0
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class PageCodec(Protocol):
    """Conversion of pages between pool and tiers. ``nbytes``: bytes of a page in a tier."""

    nbytes: int

    def encode(self, page: Bytes, kept: Bytes) -> None:
        """Convert ``page`` of the pool into ``kept``."""

    def decode(self, kept: Bytes, page: Bytes) -> None:
        """Convert ``kept`` back into ``page`` of the pool."""


class AsItIs:
    """Byte by byte."""

    def __init__(self, page_bytes: int) -> None:
        self.nbytes = page_bytes

    def encode(self, page: Bytes, kept: Bytes) -> None:
        """See the base class."""
        kept[:] = page

    def decode(self, kept: Bytes, page: Bytes) -> None:
        """See the base class."""
        page[:] = kept


class Int8:
    """Eight bits an element, then the blocks' scales (float32). ``elements`` of ``dtype`` a page."""

    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        self._elements, self._dtype = elements, dtype
        self._block = next((block for block in BLOCKS if elements % block == 0), 0)
        if not self._block:
            raise UnsupportedModel(
                f"--hicache-host-dtype int8: a page of {elements} elements has no whole blocks of {BLOCKS[-1]}; "
                "choose another --page-size, or leave the second tier as it is"
            )
        self.nbytes = elements + elements // self._block * SCALE_BYTES

    def encode(self, page: Bytes, kept: Bytes) -> None:
        """See the base class."""
        values_BE = torch.from_numpy(page).view(self._dtype).float().view(-1, self._block)
        scales_B1 = values_BE.abs().amax(dim=1, keepdim=True) / MOST
        # A block of zeros has no scale; of what is not finite nothing is promised, and the logits' check finds it.
        rounded_BE = (values_BE / scales_B1.clamp(min=torch.finfo(torch.float32).tiny)).round_()
        target = torch.from_numpy(kept)
        target[: self._elements].view(torch.int8).copy_(rounded_BE.view(-1))
        target[self._elements :].view(torch.float32).copy_(scales_B1.view(-1))

    def decode(self, kept: Bytes, page: Bytes) -> None:
        """See the base class."""
        source = torch.from_numpy(kept)
        values_BE = source[: self._elements].view(torch.int8).float().view(-1, self._block)
        scales_B1 = source[self._elements :].view(torch.float32).view(-1, 1)
        torch.from_numpy(page).view(self._dtype).copy_((values_BE * scales_B1).view(-1))


def make_codecs(name: Literal["auto", "int8"], layout: KVLayout) -> list[PageCodec]:
    """Make the codec of each group. ``name`` as in ``--hicache-host-dtype``. Raises ``UnsupportedModel``."""
    if name == "auto":
        return [AsItIs(group.page_bytes) for group in layout.groups]
    return [_int8_of(group) for group in layout.groups]


def _int8_of(group: KVGroup) -> Int8:
    dtype = DTYPES.get(group.dtype)
    if dtype is None or group.scale_dtype is not None:
        raise UnsupportedModel(
            f"--hicache-host-dtype int8: the pool's own pages are {group.dtype}, which is no larger; leave it out, or "
            "--kv-cache-dtype"
        )
    return Int8(group.page_bytes // dtype.itemsize, dtype)
