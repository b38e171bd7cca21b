"""The tensors behind the slots.

Each group of layers (``KVGroup``) has a pool of its own, which is page-first: page ``p`` is the bytes ``[p *
page_bytes, (p + 1) * page_bytes)``. P counts pages with page 0, L layers, H KV heads and D is head_dim.

- In the order "tokens" a pool is ``[P, L, 2, page_size, H, D]``, keys then values. Slot ``s = page * page_size +
  offset`` is ``pool[page, layer, k/v, offset]``. Two flat views of it do all of torch's work: rows of one token's
  heads, and rows of one layer's page of keys or values.
- In the order "blocks" it is ``[P, L, 2, H, page_size * D]``. Only the CPU kernels know the order within a head.
- If elements have one byte (``kv/quantization.py``), the pool consists of bytes. Each token's head has 4 more of them:
  its scale.
- Kind "mla" has one latent row for each token and layer, key and value in one: ``[P, L, page_size, D]``, or ``[P, L,
  page_size * D]`` in blocks.
- Kind "sparse" has a file of its own, ``kv/sparse/pool.py``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...messages.worker import KVLayout
from ..dtypes import SCALE_BYTES
from ..ops.reference import store_kv
from .quantization import LARGEST, pack_heads, unpack_heads
from .sparse.channels import LabelChannels
from .sparse.pool import SparseTokenToKVPool

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

KEYS, VALUES = 0, 1


class MHATokenToKVPool:
    """Keys and values of all slots, of one group of layers. ``dtype`` is that of their elements.

    Page 0 is never handed out and stays zero: padded lanes read it. Ranks of a host may share one: each has, as
    ``heads``, those that it reads, writes and clears.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        device: torch.device,
        buffer: Buffer | None = None,
        heads: tuple[int, int] | None = None,
        group: int = 0,
    ) -> None:
        """Make the pool over ``buffer`` (zeroed, on the CPU), or over memory of its own on ``device``.

        ``num_pages`` counts page 0. ``heads``: the KV heads ``[begin, end)`` that this rank reads, writes and clears;
        None: all. ``group``: index of the layout's page group.
        """
        self.layout = layout
        self.group = kept = layout.groups[group]
        self.dtype: torch.dtype = getattr(torch, kept.dtype)
        self._index = {layer: i for i, layer in enumerate(kept.layers)}
        self.is_quantized = self.dtype in LARGEST
        stored = torch.uint8 if self.is_quantized else self.dtype
        size, all_heads = layout.page_size, kept.kv_heads
        self._width = dim = kept.head_dim + (SCALE_BYTES if self.is_quantized else 0)
        of_layer = (size, all_heads, dim) if layout.order == "tokens" else (all_heads, size * dim)
        shape = (num_pages, kept.num_layers, 2, *of_layer)
        if buffer is None:
            self.data = torch.zeros(shape, dtype=stored, device=device)
        else:
            self.data = torch.frombuffer(buffer, dtype=stored).view(shape)
        begin, end = self.heads = heads or (0, all_heads)
        self._own = self.data[..., begin:end, :]
        self._token_rows = self.data.view(-1, all_heads * dim)[:, begin * dim : end * dim]
        self._page_rows = self.data.view(num_pages * kept.num_layers * 2, size * all_heads * dim)

    @property
    def address(self) -> int:
        """Address of page 0 on the pool's device."""
        return self.data.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, page 0 and all ranks' heads included."""
        return self.data.nbytes

    @property
    def num_pages(self) -> int:
        """Number of pages, page 0 included."""
        return len(self.data)

    @property
    def head_bytes(self) -> int:
        """Return the bytes of one head of one token in one layer, for its key or its value alone.

        In a quantised pool they include the head's scale.
        """
        return self._width * self.data.itemsize

    def token_rows(self, slots: Tensor) -> Tensor:
        """Return, for ``slots`` (int64), the row indices that ``store`` takes, the same for all layers of the group."""
        size = self.layout.page_size
        return slots // size * (self.group.num_layers * 2 * size) + slots % size

    def store(self, layer: int, token_rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Write ``k`` and ``v`` [T, H, D] of ``layer`` to T slots, quantising them if the pool is quantised.

        ``token_rows`` [T]: what the method ``token_rows`` returned for the slots. ``layer``: its number in the model.
        """
        key_rows = token_rows + self._index[layer] * 2 * self.layout.page_size
        if self.is_quantized:
            k, v = pack_heads(k, self.dtype), pack_heads(v, self.dtype)
        store_kv(self._token_rows, key_rows, key_rows + self.layout.page_size, k, v)

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the keys and values of ``layer`` in ``pages`` (int64 [N]) to two tensors [N * page_size, H, D].

        They have the pool's own type, or are dequantised to float32.
        """
        rows = pages * (self.group.num_layers * 2) + self._index[layer] * 2
        shape, (begin, end) = (-1, self.group.kv_heads, self._width), self.heads
        keys = self._page_rows.index_select(0, rows + KEYS).view(shape)[:, begin:end]
        values = self._page_rows.index_select(0, rows + VALUES).view(shape)[:, begin:end]
        if self.is_quantized:
            return unpack_heads(keys, self.dtype), unpack_heads(values, self.dtype)
        return keys, values

    def layer_pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of the keys and values of ``layer``, [P, page_size, H, D] each.

        Raises ``ValueError`` unless the pool is in the order "tokens" and not quantised.
        """
        if self.layout.order != "tokens" or self.is_quantized:
            raise ValueError(f"{self.group.dtype} in the order {self.layout.order!r} is no array of elements")
        pages = self._own[:, self._index[layer]]
        return pages[:, KEYS], pages[:, VALUES]

    def clear(self, pages: Tensor) -> None:
        """Write zeros to this rank's heads of ``pages`` (int64), in all layers of the group."""
        self._own.index_fill_(0, pages, 0)


class MLATokenToKVPool:
    """Latent rows of all slots, of one group of layers (DeepSeek-V2): a row is the key, and its first ``value_dim``
    elements are the value. Page 0 is never handed out and stays zero.

    Ranks of a host may share one. They all write the same rows, and clear the same pages.
    """

    def __init__(
        self, layout: KVLayout, num_pages: int, device: torch.device, buffer: Buffer | None = None, group: int = 0
    ) -> None:
        """Make the pool of one page group, over ``buffer`` or over memory of its own on ``device``.

        ``group``: index of the layout's page group. ``num_pages`` counts page 0. ``buffer`` is zeroed memory on the
        CPU.
        """
        self.layout = layout
        self.group = kept = layout.groups[group]
        self.dtype: torch.dtype = getattr(torch, kept.dtype)
        self.heads = (0, 1)
        self._index = {layer: i for i, layer in enumerate(kept.layers)}
        self.is_quantized = False
        of_layer = (layout.page_size, kept.head_dim)
        shape = (num_pages, kept.num_layers, *(of_layer if layout.order == "tokens" else (math.prod(of_layer),)))
        if buffer is None:
            self.data = torch.zeros(shape, dtype=self.dtype, device=device)
        else:
            self.data = torch.frombuffer(buffer, dtype=self.dtype).view(shape)
        self._token_rows = self.data.view(-1, kept.head_dim)
        self._page_rows = self.data.view(num_pages * kept.num_layers, -1)

    @property
    def address(self) -> int:
        """Address of page 0 on the pool's device."""
        return self.data.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, page 0 included."""
        return self.data.nbytes

    @property
    def num_pages(self) -> int:
        """Number of pages, page 0 included."""
        return len(self.data)

    @property
    def head_bytes(self) -> int:
        """Bytes of the latent row of one token in one layer."""
        return self.group.head_dim * self.data.itemsize

    def token_rows(self, slots: Tensor) -> Tensor:
        """Return, for ``slots`` (int64), the row indices that ``store`` takes, the same for all layers of the group."""
        size = self.layout.page_size
        return slots // size * (self.group.num_layers * size) + slots % size

    def store(self, layer: int, token_rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Write the latent rows ``k`` [T, 1, D] of ``layer`` to T slots. ``v`` is ignored: it is part of ``k``.

        ``token_rows`` [T]: what the method ``token_rows`` returned for the slots.
        """
        rows = token_rows + self._index[layer] * self.layout.page_size
        self._token_rows.index_copy_(0, rows, k.reshape(-1, self.group.head_dim).to(self.dtype))

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the latent rows of ``layer`` in ``pages`` (int64 [N]), and return them as keys and values.

        Keys are [N * page_size, 1, D]. Values are a view of their first ``value_dim`` elements.
        """
        rows = pages * self.group.num_layers + self._index[layer]
        found = self._page_rows.index_select(0, rows).view(-1, 1, self.group.head_dim)
        return found, found[..., : self.group.value_dim]

    def layer_rows(self, layer: int) -> Tensor:
        """Return a view of the latent rows of ``layer``, [P, page_size, D].

        Raises ``ValueError`` unless the pool is in the order "tokens".
        """
        if self.layout.order != "tokens":
            raise ValueError(f"the order {self.layout.order!r} is not by token")
        return self.data[:, self._index[layer]]

    def clear(self, pages: Tensor) -> None:
        """Write zeros to ``pages`` (int64) in all layers of the group."""
        self.data.index_fill_(0, pages, 0)


KVPool = MHATokenToKVPool | MLATokenToKVPool | SparseTokenToKVPool


def make_pool(
    layout: KVLayout,
    num_pages: int,
    device: torch.device,
    buffer: Buffer | None = None,
    heads: tuple[int, int] | None = None,
    group: int = 0,
    labels: LabelChannels | None = None,
) -> KVPool:
    """Make the pool of one page group: for latent rows, for labelled keys, or else for keys and values.

    ``num_pages``, ``buffer``, ``heads``, ``group``: as for ``MHATokenToKVPool``. ``labels``: the label channels that
    the layout was made with; None: it has no labels.
    """
    if labels is not None:
        return SparseTokenToKVPool(layout, num_pages, device, labels.indices, buffer)
    if layout.groups[group].kind == "mla":
        return MLATokenToKVPool(layout, num_pages, device, buffer, group)
    return MHATokenToKVPool(layout, num_pages, device, buffer, heads, group)
