"""What a KV page holds, in a few numbers: a hash of each part (keys, values, …) of each layer.

The bytes that are hashed are those of the order "tokens", so that a page of the CPU engine and one of torch with the
same elements say the same. What is quantised is hashed as it lies there: elements, each head's scale behind them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ..disaggregation.transfer.page_order import PageConverter
from ..messages.base import unpack_i32
from ..messages.kv_debug import HASH_BYTES
from ..messages.worker import KVLayout

Bytes = npt.NDArray[np.uint8]


class PageHasher:
    """Hashes pages of a ``group`` of the layout. ``is_canonical``: equal KV in another order would hash the same; False
    for a layout whose pages are of one order only.
    """

    def __init__(self, layout: KVLayout, group: int) -> None:
        kept = layout.groups[group]
        self._nbytes = kept.page_bytes
        self._sizes = kept.part_bytes * kept.num_layers
        self.none = bytes(HASH_BYTES * len(self._sizes))
        """What is said of a page that is not there."""
        self._converter: PageConverter | None = None
        self.is_canonical = True
        if layout.order != "tokens" and kept.page_bytes:
            try:
                self._converter = PageConverter(msgspec.structs.replace(layout, order="tokens"), layout.order, group)
            except ValueError:
                self.is_canonical = False

    def hash(self, page: Bytes) -> bytes:
        """Of one page (``page_bytes``), which stays as it is: layer by layer, part by part."""
        if self._converter is not None:
            page = page.copy()
            self._converter.convert(page)
        at, hashes, memory = 0, [], page.data
        for size in self._sizes:
            hashes.append(xxhash.xxh3_64_intdigest(memory[at : at + size]))
            at += size
        return np.array(hashes, dtype="<u8").tobytes()

    def hash_all(self, pages: bytes, page_of: Callable[[int], Bytes]) -> bytes:
        """Of ``pages`` (int32; 0: none), one after another; ``page_of``: the bytes of each."""
        return b"".join(self.hash(page_of(page)) if page else self.none for page in unpack_i32(pages).tolist())
