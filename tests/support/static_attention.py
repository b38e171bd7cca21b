"""Attention in plain torch that a graph can be captured of: every row is gathered in full, which only a small context
bears.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.model_runner.attention.base import AttentionBackend
from pdserve.model_runner.attention.torch_backend import TorchAttention
from pdserve.model_runner.batch.forward_batch import ForwardBatch


class StaticAttention(AttentionBackend):
    """Captured passes by itself, all others by ``TorchAttention``."""

    is_graph_safe = True
    reads_whole_pages = True

    def __init__(self, pools, dtype: torch.dtype) -> None:
        self._pool = pools[0]
        self._eager = TorchAttention(pools, dtype)
        self._plans: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._size = 0

    def plan(self, batch: ForwardBatch) -> None:
        self._size = len(batch.q_lens) if batch.is_captured else 0
        if not self._size:
            with torch._C.DisableTorchFunction():  # the reference waits where it likes
                self._eager.plan(batch)
            return
        with torch._C.DisableTorchFunction():
            known = (batch.starts, batch.host_rows.tolist())
            assert known == (batch.positions.tolist(), batch.rows.tolist()), "host and device disagree"
        slots = batch.req_to_token[batch.rows]
        hidden = torch.arange(slots.shape[1]) >= batch.positions[:, None] + 1
        plan = (self._pool.token_rows(batch.out_cache_loc), slots.long().masked_fill(hidden, 0), hidden)
        if self._size not in self._plans:
            self._plans[self._size] = plan
        for old, new in zip(self._plans[self._size], plan, strict=True):
            old.copy_(new)

    def forward(self, layer, q, k, v, spec, sinks=None) -> Tensor:
        if not self._size:
            return self._eager.forward(layer, q, k, v, spec, sinks)
        token_rows, slots_BS, hidden_BS = self._plans[self._size]
        self._pool.store(layer, token_rows, k, v)
        page = self._pool.layout.page_size
        keys, values = (
            self._pool.data[:, layer, which].flatten(0, 1)[slots_BS.flatten()].view(*slots_BS.shape, *k.shape[1:])
            for which in (0, 1)
        )
        assert self._pool.data.shape[3] == page
        groups = q.shape[1] // k.shape[1]
        keys, values = keys.repeat_interleave(groups, 2), values.repeat_interleave(groups, 2)
        scores = torch.einsum("bhd,bshd->bhs", q, keys) * spec.scale
        weights = scores.masked_fill(hidden_BS[:, None], -torch.inf).softmax(-1)
        return torch.einsum("bhs,bshd->bhd", weights, values).flatten(1)
