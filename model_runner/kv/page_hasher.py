"""Fingerprints of KV pages: a hash of each part (keys, values, …) of each layer.

Bytes are hashed in the order "tokens". So a page of the CPU engine and one of torch with the same elements have equal
hashes. Quantised KV is hashed as stored: elements, with each head's scale after them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ...mem_cache.kv_pages.page_order import PageConverter
from ...messages.base import unpack_i32
from ...messages.kv_debug import HASH_BYTES
from ...messages.worker import KVLayout

Bytes = npt.NDArray[np.uint8]


class PageHasher:
    """Hasher for the pages of one ``group`` of the layout."""

    def __init__(self, layout: KVLayout, group: int) -> None:
        kept = layout.groups[group]
        self._nbytes = kept.page_bytes
        self._sizes = kept.part_bytes * kept.num_layers
        self.none = bytes(HASH_BYTES * len(self._sizes))
        """Hashes reported for a page that does not exist: zeros."""
        self._converter: PageConverter | None = None
        self.is_canonical = True
        """True if equal KV in another order hashes the same; False if pages cannot be put into the order "tokens"."""
        if layout.order != "tokens" and kept.page_bytes:
            try:
                self._converter = PageConverter(msgspec.structs.replace(layout, order="tokens"), layout.order, group)
            except ValueError:
                self.is_canonical = False

    def hash(self, page: Bytes) -> bytes:
        """Return 8 bytes (xxh3_64) for each part (keys, values, ...) of each layer of one page, in their order.

        ``page``: its bytes, which are not modified. A copy is put into the order "tokens" first, if that is possible.
        """
        if self._converter is not None:
            page = page.copy()
            self._converter.convert(page)
        at, hashes, memory = 0, [], page.data
        for size in self._sizes:
            hashes.append(xxhash.xxh3_64_intdigest(memory[at : at + size]))
            at += size
        return np.array(hashes, dtype="<u8").tobytes()

    def hash_all(self, pages: bytes, page_of: Callable[[int], Bytes]) -> bytes:
        """Return the hashes of ``pages``, joined in order.

        ``pages``: page numbers as packed int32. Number 0 stands for no page, and its hashes are zeros. ``page_of``
        returns the bytes of a page by its number.
        """
        return b"".join(self.hash(page_of(page)) if page else self.none for page in unpack_i32(pages).tolist())
