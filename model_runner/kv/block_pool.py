"""A pool in the order "blocks", as the C++ engine reads and writes it: bytes of the host, without torch.

Page ``p`` is the bytes ``[p * page_bytes, (p + 1) * page_bytes)``. In it the parts (keys, then values) of a layer lie
one after another, and in a part the heads. What lies within a head is the kernels' affair (``kv_blocks.h``).
"""

from __future__ import annotations

from mmap import mmap

import numpy as np
import numpy.typing as npt

from ...messages.worker import KVLayout


class BlockPool:
    """Keys and values of all slots, of one group of layers.

    Page 0 is never handed out and stays zero: padded lanes read it. Ranks of a host may share one: each has, as
    ``heads``, those that it reads, writes and clears. Latent rows have one head, which all ranks write alike.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        buffer: mmap | None = None,
        heads: tuple[int, int] | None = None,
        group: int = 0,
    ) -> None:
        """Lay the pool over ``buffer`` (zeroed), or over memory of its own.

        ``num_pages`` counts page 0. ``heads``: ``[begin, end)`` of the pool's; None: all. ``group``: of the layout's.
        """
        self.layout = layout
        self.group = kept = layout.groups[group]
        count, layers, is_latent = num_pages, kept.num_layers, kept.kind == "mla"
        all_heads, parts = (1, 1) if is_latent else (kept.kv_heads, 2)
        layer_bytes = kept.page_bytes // max(1, layers)
        shape = (count, layers, layer_bytes)
        self.data: npt.NDArray[np.uint8] = (
            np.zeros(shape, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8).reshape(shape)
        )
        """[P, L, bytes of a layer]."""
        self.heads = (0, 1) if is_latent else heads or (0, all_heads)
        self.head_bytes = layer_bytes // (parts * all_heads * layout.page_size)
        """Bytes of a token's head, with its scale if it has one; of its row, where rows are latent."""
        begin, end = self.heads
        by_head = self.data.reshape(count, layers, parts, all_heads, layout.page_size * self.head_bytes)
        self._own = by_head[:, :, :, begin:end]

    @property
    def address(self) -> int:
        """Address of page 0."""
        return self.data.ctypes.data

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.data.nbytes

    @property
    def num_pages(self) -> int:
        """Pages, page 0 included."""
        return len(self.data)

    def clear(self, pages: npt.NDArray[np.integer]) -> None:
        """Clear ``pages`` in all layers: write zeros."""
        self._own[pages] = 0
