"""Attention by FlashInfer (Ye et al., 2025), over pages as they lie: planned once a pass for each kind of layer.

A pass of one token of each entry is its decode kernel's, any other its prefill kernel's, whose entries may well be of
one token. Planning needs lengths alone, which the host knows; which pages are meant is looked up on the device.

Shapes: T tokens, B entries, H heads, K KV heads, D head_dim, P pages, N pages of all entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ....model_files.spec import AttentionSpec, MLASpec
from ...batch.forward_batch import ForwardBatch
from ...batch.step_plan import kv_indices, paged_indices
from ...device.base import Device
from ...kv.pool import KVPool, MHATokenToKVPool, MLATokenToKVPool
from ..base import AttentionBackend
from ..layer_kinds import layer_kinds
from .plans import KindPlans, PassIndices, Sizes

MIB = 1 << 20


class FlashInferAttention(AttentionBackend):
    """See the module; ``attention/flashinfer/support.py`` has said yes."""

    is_graph_safe = True

    def __init__(
        self,
        pool: KVPool,
        dtype: torch.dtype,
        window_pool: KVPool | None,
        attentions: Sequence[AttentionSpec | MLASpec],
        device: Device,
        workspace_mib: int,
        most_pages: int,
    ) -> None:
        """``attentions``: of every layer. ``most_pages``: that all entries of a captured pass can have,
        each its own though they may share some."""
        # Imported here: it takes a second, and compiles.
        import flashinfer
        import flashinfer.mla

        self._pool, self._window_pool = pool, window_pool
        self._device = device
        self._page_size = pool.layout.page_size
        windowed = frozenset(() if window_pool is None else window_pool.group.layers)
        kinds, self._kind_of = layer_kinds(attentions, windowed)
        workspace = torch.empty(workspace_mib * MIB, dtype=torch.uint8, device=device.torch)
        sizes = Sizes(self._page_size, most_pages, dtype)
        self._plans = [KindPlans(flashinfer, device, workspace, kind, sizes) for kind in kinds]
        self._is_windowed = [kind.windowed for kind in kinds]
        self._batch: ForwardBatch | None = None
        self._token_rows = self._window_rows = torch.empty(0)

    def plan(self, batch: ForwardBatch) -> None:
        """See the base class."""
        self._batch = batch
        lens = np.array(batch.starts) + np.array(batch.q_lens)
        indices = paged_indices(lens, self._page_size)
        kv_indptr = self._device.staged(indices.kv_indptr)
        there = kv_indptr.to(self._device.torch, non_blocking=True)
        pages = kv_indices(batch.req_to_token, batch.rows, there, indices.num_pages, self._page_size)
        ends = np.concatenate((np.zeros(1, dtype=np.int32), np.cumsum(batch.q_lens, dtype=np.int32)))
        kept = PassIndices(
            qo_indptr=self._device.staged(ends),
            kv_indptr=kv_indptr,
            last_page_len=self._device.staged(indices.last_page_len),
            kv_lens=self._device.staged(lens.astype(np.int32)),
            kv_indices=pages,
            is_decode=batch.num_tokens == len(lens),
            captured=len(lens) if batch.is_captured else 0,
        )
        windowed = kept
        if batch.window_pages is not None:
            # Behind a window it is page 0, whose tokens are not seen.
            windowed = kept._replace(kv_indices=batch.window_pages[pages.long()])
        for plans, is_windowed in zip(self._plans, self._is_windowed, strict=True):
            plans.plan(windowed if is_windowed else kept)

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec | MLASpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See the base class."""
        if layer == 0:
            # Within the pass, so that a graph looks it up anew.
            self._find_rows()
        kind = self._kind_of[layer]
        is_windowed = self._is_windowed[kind] and self._window_pool is not None
        pool = self._window_pool if is_windowed and self._window_pool is not None else self._pool
        pool.store(layer, self._window_rows if is_windowed else self._token_rows, k, v)
        if isinstance(pool, MLATokenToKVPool):
            return self._plans[kind].run_latent(q, pool.layer_rows(layer)).flatten(1)
        assert isinstance(pool, MHATokenToKVPool)  # KV with labels is the torch backend's
        keys, values = pool.layer_pages(layer)
        return self._plans[kind].run(q.contiguous(), keys, values, sinks).flatten(1)

    def _find_rows(self) -> None:
        assert self._batch is not None
        slots, size = self._batch.out_cache_loc, self._page_size
        self._token_rows = self._pool.token_rows(slots)
        if self._window_pool is not None and self._batch.window_pages is not None:
            pages = self._batch.window_pages[slots // size].to(torch.int64)
            self._window_rows = self._window_pool.token_rows(pages * size + slots % size)
