"""The kernels' view of a KV pool and of the entries of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ...messages.base import I32
from ...messages.worker import KVGroup, KVLayout
from ..batch.host_batch import I64
from .library import NATIVE_KV_DTYPES
from .structs import KVPoolView

HEAD_DIM_MULTIPLE = 16
BLOCK_SLOTS = 16
"""``kBlockSlots`` of kv_blocks.h: a page is made of whole blocks, or is a part of one."""

LATENT_HEADS = 16
"""Query heads that read latent rows together, at most: enough to make reading cheap, and groups for other threads."""


class KernelPool(Protocol):
    """A pool that the kernels can be shown: ``BlockPool``, and torch's in the order "blocks" on the host."""

    layout: KVLayout
    group: KVGroup
    heads: tuple[int, int]

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head of one token in one layer, for its key or its value alone.

        A quantised head's scale counts. With latent rows, the bytes are those of a row.
        """
        ...

    @property
    def address(self) -> int:
        """Address of page 0 in this process's memory."""
        ...

    @property
    def num_pages(self) -> int:
        """Number of pages, page 0 included."""
        ...


def pool_view(pool: KernelPool, num_heads: int) -> KVPoolView:
    """Return the struct by which the kernels read ``pool`` for ``num_heads`` query heads.

    The caller keeps ``pool`` alive. Raises ``ValueError`` if the kernels can't read such a pool.
    """
    layout, group = pool.layout, pool.group
    if group.head_dim % HEAD_DIM_MULTIPLE or group.dtype not in NATIVE_KV_DTYPES:
        raise ValueError(
            "the CPU attention kernel takes float32, bfloat16, int8 and float8 heads of a multiple of "
            f"{HEAD_DIM_MULTIPLE}, not {group.dtype} heads of {group.head_dim}"
        )
    if layout.order != "blocks":
        raise ValueError(f"the CPU attention kernel reads KV in blocks, not in the order {layout.order!r}")
    if layout.page_size % BLOCK_SLOTS and BLOCK_SLOTS % layout.page_size:
        raise ValueError(f"pages of {layout.page_size} slots can't be made of blocks of {BLOCK_SLOTS} or fewer")
    begin, end = pool.heads
    readers = end - begin
    if group.kind == "mla":
        if group.value_dim % HEAD_DIM_MULTIPLE:
            raise ValueError(f"values of {group.value_dim} elements are no multiple of {HEAD_DIM_MULTIPLE}")
        readers = next(n for n in range(1, num_heads + 1) if num_heads % n == 0 and num_heads // n <= LATENT_HEADS)
    return KVPoolView(
        pool.address + begin * layout.page_size * pool.head_bytes,
        NATIVE_KV_DTYPES[group.dtype],
        group.num_layers,
        layout.page_size,
        readers,
        group.head_dim,
        group.kv_heads,
        group.value_dim,
    )


def pass_entries(rows: I64, starts: I64 | Sequence[int], q_lens: I64 | Sequence[int]) -> I32:
    """Return the B entries of a pass as ``AttentionEntry`` of attention.h: [B, 4] int32.

    Columns: row of the request table, first position, number of tokens, index of the first token in the pass.
    """
    lens = np.asarray(q_lens, dtype=np.int32)
    columns = (rows, starts, lens, np.cumsum(lens) - lens)
    return np.stack([np.asarray(column, dtype=np.int32) for column in columns], axis=1)
