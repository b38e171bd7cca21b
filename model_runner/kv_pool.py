"""The tensors behind the slots.

Each group of layers (``KVGroup``) has a pool of its own, which is page-first: page ``p`` is the bytes
``[p * page_bytes, (p + 1) * page_bytes)``. In the order "tokens" it is
``[P, L, 2, page_size, H, D]`` (P pages with page 0, L layers, keys then values, H KV heads, D head_dim), so that a slot
``s = page * page_size + offset`` is ``pool[page, layer, k/v, offset]``; two flat views of it do all of torch's work:
rows of one token's heads, and rows of one layer's page of keys or values. In the order "blocks" it is
``[P, L, 2, H, page_size * D]``, and nothing but the CPU kernels knows what lies within a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ..messages.worker import KVGroup, KVLayout, KVOrder
from .kernels.reference import store_kv

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

KEYS, VALUES = 0, 1


class HasKV(Protocol):
    """What keeps keys and values: a ``ModelSpec``, or a ``KVShape``."""

    @property
    def num_layers(self) -> int:
        """Layers that keep any."""

    @property
    def num_kv_heads(self) -> int:
        """Of every layer."""

    @property
    def head_dim(self) -> int:
        """Of keys and of values."""


class KVShape(NamedTuple):
    """The sizes by themselves; see ``HasKV``."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


def make_layout(
    spec: HasKV,
    page_size: int,
    dtype: torch.dtype,
    order: KVOrder = "tokens",
    windows: Mapping[int, int] | None = None,
) -> KVLayout:
    """The layout of ``spec``'s pages. ``windows``: of these layers, how many tokens they see; their pages go back."""
    windows = windows or {}

    def group(layers: tuple[int, ...], window: int) -> KVGroup:
        values = len(layers) * 2 * page_size * spec.num_kv_heads * spec.head_dim
        name = str(dtype).removeprefix("torch.")
        return KVGroup(layers, "mha", spec.num_kv_heads, spec.head_dim, name, values * dtype.itemsize, window)

    kept = group(tuple(layer for layer in range(spec.num_layers) if layer not in windows), 0)
    if not windows:
        return KVLayout(page_size, (kept,), order)
    return KVLayout(page_size, (kept, group(tuple(sorted(windows)), max(windows.values()))), order)


class MHATokenToKVPool:
    """Keys and values of all slots, of one group of layers. Page 0 is never handed out and stays zero: padded lanes
    read it.

    Ranks of a host may share one: each has, as ``heads``, those that it reads, writes and clears.
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
        """Lay the pool over ``buffer`` (zeroed, on the CPU), or over memory of its own.

        ``num_pages`` counts page 0. ``heads``: ``[begin, end)`` of the pool's; None: all. ``group``: of the layout's.
        """
        self.layout = layout
        self.group = kept = layout.groups[group]
        self.dtype: torch.dtype = getattr(torch, kept.dtype)
        self._index = {layer: i for i, layer in enumerate(kept.layers)}
        size, all_heads, dim = layout.page_size, kept.kv_heads, kept.head_dim
        of_layer = (size, all_heads, dim) if layout.order == "tokens" else (all_heads, size * dim)
        shape = (num_pages, kept.num_layers, 2, *of_layer)
        if buffer is None:
            self.data = torch.zeros(shape, dtype=self.dtype, device=device)
        else:
            self.data = torch.frombuffer(buffer, dtype=self.dtype).view(shape)
        begin, end = self.heads = heads or (0, all_heads)
        self._own = self.data[..., begin:end, :]
        self._token_rows = self.data.view(-1, all_heads * dim)[:, begin * dim : end * dim]
        self._page_rows = self.data.view(num_pages * kept.num_layers * 2, size * all_heads * dim)

    def token_rows(self, slots: Tensor) -> Tensor:
        """Where the first layer's keys of ``slots`` (int64) lie among the token rows; the argument of ``store``."""
        size = self.layout.page_size
        return slots // size * (self.group.num_layers * 2 * size) + slots % size

    def store(self, layer: int, token_rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Write ``k`` and ``v`` [T, H, D] of ``layer`` to the slots behind ``token_rows`` [T]."""
        key_rows = token_rows + self._index[layer] * 2 * self.layout.page_size
        store_kv(self._token_rows, key_rows, key_rows + self.layout.page_size, k, v)

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of ``layer`` in ``pages`` (int64 [N]): two copies [N * page_size, H, D]."""
        rows = pages * (self.group.num_layers * 2) + self._index[layer] * 2
        shape, (begin, end) = (-1, self.group.kv_heads, self.group.head_dim), self.heads
        keys = self._page_rows.index_select(0, rows + KEYS)
        values = self._page_rows.index_select(0, rows + VALUES)
        return keys.view(shape)[:, begin:end], values.view(shape)[:, begin:end]

    def clear(self, pages: Tensor) -> None:
        """Zero ``pages`` (int64) in all layers."""
        self._own.index_fill_(0, pages, 0)
