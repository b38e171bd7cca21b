"""KV with tokens that can be chosen from: beside keys and values, a label of each key (kind "sparse" of ``KVGroup``).

A label is a copy of the elements of its key that contribute most to a score (``channels.py``). Labels lie apart from
the keys, those of a head together, because choosing tokens reads them and nothing else. A page is ``[L, page_size * K *
(2 D + C)]``. Each layer has its keys and values ``[2, page_size, K, D]``, as in ``MHATokenToKVPool``, then the labels
``[K, page_size, C]``.

Shapes: P pages with page 0, L layers, K KV heads, D head_dim, C elements of a label, T tokens, N rows of a batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....messages.worker import KVLayout

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


class SparseTokenToKVPool:
    """Keys, values and labels of all slots. Page 0 is never handed out and stays zero: padded lanes read it."""

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        device: torch.device,
        channels: Tensor,
        buffer: Buffer | None = None,
    ) -> None:
        """Make the pool over ``buffer`` (zeroed, on the CPU), or over memory of its own on ``device``.

        ``num_pages`` counts page 0. ``channels`` ([L, K, C]): the elements of each key that are its label.
        """
        self.layout = layout
        self.group = kept = layout.groups[0]
        self.dtype: torch.dtype = getattr(torch, kept.dtype)
        self.heads = (0, kept.kv_heads)
        self.is_quantized = False
        self.channels = channels.to(device)
        size, heads, dim, label_dim = layout.page_size, kept.kv_heads, kept.head_dim, kept.label_dim
        self._part = size * heads * dim
        self._width = 2 * self._part + size * heads * label_dim
        shape = (num_pages, kept.num_layers, self._width)
        if buffer is None:
            self.data = torch.zeros(shape, dtype=self.dtype, device=device)
        else:
            self.data = torch.frombuffer(buffer, dtype=self.dtype).view(shape)
        kv, labels = self.data[..., : 2 * self._part], self.data[..., 2 * self._part :]
        self._kv = kv.view(num_pages, kept.num_layers, 2, size, heads, dim)
        self._labels = labels.view(num_pages, kept.num_layers, heads, size, label_dim)
        # What is read begins at a multiple of this: a head of a token, a head's labels of a page, a page's keys.
        self._step = math.gcd(dim, label_dim)
        self._layer_steps = self._width // self._step
        self._page_runs = self._runs(self._part)
        self._head_runs = self._runs(dim)
        self._label_runs = self._runs(size * label_dim)
        self._all_heads = torch.arange(heads, device=device)

    @property
    def address(self) -> int:
        """Address of page 0 on the pool's device."""
        return self.data.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, page 0 and labels included."""
        return self.data.nbytes

    @property
    def num_pages(self) -> int:
        """Number of pages, page 0 included."""
        return len(self.data)

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head of one token in one layer, for its key or its value alone, without its label."""
        return self.group.head_dim * self.data.itemsize

    def token_rows(self, slots: Tensor) -> Tensor:
        """Return the page of each of ``slots`` (int64) and its offset in the page, [2, T], as ``store`` takes them."""
        size = self.layout.page_size
        return torch.stack((slots // size, slots % size))

    def store(self, layer: int, token_rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Write ``k`` and ``v`` [T, K, D] of ``layer``, and the labels of ``k``, to T slots.

        ``token_rows`` [2, T]: what the method ``token_rows`` returned for the slots.
        """
        pages, offsets = token_rows
        self._kv[pages, layer, 0, offsets] = k.to(self.dtype)
        self._kv[pages, layer, 1, offsets] = v.to(self.dtype)
        labels = self.label(layer, k[:, :, None])[:, :, 0]
        self._labels[pages[:, None], layer, self._all_heads, offsets[:, None]] = labels.to(self.dtype)

    def label(self, layer: int, x: Tensor) -> Tensor:
        """Return the label channels of ``x`` [N, K, G, D], as [N, K, G, C].

        ``x`` are keys (G is 1), or the G queries that read each KV head.
        """
        channels = self.channels[layer][None, :, None]
        return x.gather(-1, channels.expand(*x.shape[:3], -1))

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the keys and values of ``layer`` in ``pages`` (int64 [N]) to two tensors [N * page_size, K, D]."""
        starts, shape = self._starts(layer, pages), (-1, self.group.kv_heads, self.group.head_dim)
        keys = self._page_runs.index_select(0, starts // self._step).view(shape)
        return keys, self._page_runs.index_select(0, (starts + self._part) // self._step).view(shape)

    def label_rows(self, pages: Tensor) -> Tensor:
        """Return the row indices [N, K, M] that ``gather_labels`` takes, one for each KV head and page.

        ``pages``: int64 [N, M]. The indices serve every layer.
        """
        heads = self._all_heads[:, None] * (self.layout.page_size * self.group.label_dim)
        return (self._starts(0, pages)[:, None] + 2 * self._part + heads) // self._step

    def gather_labels(self, layer: int, label_rows: Tensor) -> Tensor:
        """Copy the labels of ``layer`` to a tensor [N * K, M * page_size, C].

        ``label_rows`` [N, K, M]: what the method ``label_rows`` returned for the pages.
        """
        found = self._label_runs.index_select(0, (label_rows + layer * self._layer_steps).flatten())
        return found.view(label_rows.shape[0] * label_rows.shape[1], -1, self.group.label_dim)

    def lane_rows(self, pages: Tensor) -> Tensor:
        """Return a row index for each token in ``pages`` (int64 [N, M]): [N, M * page_size].

        ``gather_heads`` takes these indices for chosen tokens. They serve every layer and head.
        """
        offsets = torch.arange(self.layout.page_size, device=pages.device)
        starts = self._starts(0, pages)[..., None] + offsets * (self.group.kv_heads * self.group.head_dim)
        return starts.flatten(1) // self._step

    def gather_heads(self, layer: int, lane_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the keys and values of M chosen tokens for each KV head of ``layer``: two tensors [N, K, M, D].

        ``lane_rows`` [N, K, M]: indices of the tokens, from the method ``lane_rows``.
        """
        dim = self.group.head_dim
        heads = self._all_heads[:, None] * (dim // self._step) + layer * self._layer_steps
        rows, shape = (lane_rows + heads).flatten(), (*lane_rows.shape, dim)
        keys = self._head_runs.index_select(0, rows).view(shape)
        return keys, self._head_runs.index_select(0, rows.add_(self._part // self._step)).view(shape)

    def clear(self, pages: Tensor) -> None:
        """Write zeros to ``pages`` (int64) in all layers, labels included."""
        self.data.index_fill_(0, pages, 0)

    def _starts(self, layer: int, pages: Tensor) -> Tensor:
        """Return where ``layer`` begins in each of ``pages``: the index of its first element in the whole pool."""
        return (pages * self.group.num_layers + layer) * self._width

    def _runs(self, length: int) -> Tensor:
        """Return an overlapping view of the pool, for ``index_select``; only read it.

        Row i is the ``length`` elements from element i * ``_step`` on.
        """
        count = (self.data.numel() - length) // self._step + 1
        return self.data.view(-1).as_strided((count, length), (self._step, 1))
