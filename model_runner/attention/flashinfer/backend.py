"""Attention by FlashInfer (Ye et al., 2025), over pages as they lie: planned once a pass for each kind of layer.

A pass with one token for each entry runs its decode kernel. Any other pass runs its prefill kernel, which also takes
entries of one token. Planning needs lengths alone, which the host knows; page numbers are looked up on the device.

Shapes: T tokens, B entries, H heads, K KV heads, D head_dim, P pages, N pages of all entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ....model_files.spec import AttentionSpec, MLASpec
from ...batch.forward_batch import ForwardBatch
from ...batch.step_plan import paged_indices
from ...device.base import Device
from ...kv.pool import KVPool, MHATokenToKVPool, MLATokenToKVPool
from ..base import AttentionBackend
from ..group_pools import group_pools, groups_of_layers
from ..kv_indices import kv_indices
from ..layer_kinds import layer_kinds
from .plans import KindPlans, PassIndices, Sizes

MIB = 1 << 20


class FlashInferAttention(AttentionBackend):
    """Attention by FlashInfer's paged kernels, for a model that ``support.py`` beside this file accepts."""

    is_graph_safe = True

    def __init__(
        self,
        pools: Sequence[KVPool],
        dtype: torch.dtype,
        attentions: Sequence[AttentionSpec | MLASpec],
        device: Device,
        workspace_mib: int,
        most_pages: int,
    ) -> None:
        """Make FlashInfer's wrappers for each kind of layer, and allocate their workspace of ``workspace_mib`` MiB.

        ``pools``: one for each page group. ``attentions``: one for each layer. ``most_pages``: maximum pages of all
        entries of a captured pass together; a page that entries share counts for each of them.
        """
        # Imported here: it takes a second, and compiles.
        import flashinfer
        import flashinfer.mla

        self._groups = group_pools(pools)
        self._device = device
        self._page_size = pools[0].layout.page_size
        kinds, self._kind_of = layer_kinds(attentions, groups_of_layers(pools))
        workspace = torch.empty(workspace_mib * MIB, dtype=torch.uint8, device=device.torch)
        sizes = Sizes(self._page_size, most_pages, dtype)
        self._plans = [KindPlans(flashinfer, device, workspace, kind, sizes) for kind in kinds]
        self._group_of = [kind.group for kind in kinds]
        self._batch: ForwardBatch | None = None
        self._token_rows: list[Tensor] = []

    def plan(self, batch: ForwardBatch) -> None:
        """Plan FlashInfer's kernels for each kind of layer, by lengths that the host knows.

        The pages' numbers are gathered on the device, without waiting.
        """
        self._batch = batch
        lens = np.array(batch.starts) + np.array(batch.q_lens)
        indices = paged_indices(lens, self._page_size)
        kv_indptr = self._device.staged(indices.kv_indptr)
        there = kv_indptr.to(self._device.torch, non_blocking=True)
        pages = kv_indices(batch.req_to_token, batch.rows, there, indices.num_pages, self._page_size)
        ends = np.concatenate((np.zeros(1, dtype=np.int32), np.cumsum(batch.q_lens, dtype=np.int32)))
        full = PassIndices(
            qo_indptr=self._device.staged(ends),
            kv_indptr=kv_indptr,
            last_page_len=self._device.staged(indices.last_page_len),
            kv_lens=self._device.staged(lens.astype(np.int32)),
            kv_indices=pages,
            is_decode=batch.num_tokens == len(lens),
            captured=len(lens) if batch.is_captured else 0,
        )
        # Before a window the entry is page 0, and its tokens are masked.
        by_group = [full._replace(kv_indices=group.pages(batch, pages)) for group in self._groups]
        for plans, group in zip(self._plans, self._group_of, strict=True):
            plans.plan(by_group[group])

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec | MLASpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write ``k`` and ``v`` into the pool, then return the attention by the kernel planned for this kind of layer.

        Layer 0 first looks up where the pass writes, so that a captured graph repeats the lookup.
        """
        if layer == 0:
            # Within the pass, so that a graph looks it up anew.
            self._find_rows()
        kind = self._kind_of[layer]
        group = self._group_of[kind]
        pool = self._groups[group].pool
        pool.store(layer, self._token_rows[group], k, v)
        if isinstance(pool, MLATokenToKVPool):
            return self._plans[kind].run_latent(q, pool.layer_rows(layer)).flatten(1)
        assert isinstance(pool, MHATokenToKVPool)  # KV with labels is the torch backend's
        keys, values = pool.layer_pages(layer)
        return self._plans[kind].run(q.contiguous(), keys, values, sinks).flatten(1)

    def _find_rows(self) -> None:
        assert self._batch is not None
        self._token_rows = [group.pool.token_rows(group.slots(self._batch)) for group in self._groups]
