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
        """Make the pool over ``buffer`` (zeroed), or over memory of its own.

        ``num_pages`` counts page 0. ``heads``: the KV heads ``[begin, end)`` that this rank reads, writes and clears;
        None: all. ``group``: index of the layout's page group.
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
        """Address of page 0 in this process's memory."""
        return self.data.ctypes.data

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, page 0 and all ranks' heads included."""
        return self.data.nbytes

    @property
    def num_pages(self) -> int:
        """Number of pages, page 0 included."""
        return len(self.data)

    def clear(self, pages: npt.NDArray[np.integer]) -> None:
        """Write zeros to this rank's heads of ``pages``, in all layers of the group."""
        self._own[pages] = 0
