"""Attention in plain torch: correct for any mix of prefill chunks and decode steps, on every device.

A pass's entries part in two. Entries of one token (decode steps, in the main) run as one padded batch: their pages are
gathered into [B, S] lanes, and the query heads that share a KV head stand in the query dimension, so that K and V are
never repeated. Longer entries run one by one, in blocks of queries that see no more keys than causality allows.

Shapes: T tokens of the pass, B entries of one token, S gathered lanes (whole pages), H heads, K KV heads, G = H / K,
D head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..forward_batch import ForwardBatch
from ..kv_pool import MHATokenToKVPool
from .base import AttentionBackend

QUERY_BLOCK = 128


class DecodePlan(NamedTuple):
    """Entries of one token. ``tokens``: [B] indices into T; ``pages``: [B * S / page_size]; ``mask``: [B, 1, 1, S]."""

    tokens: Tensor
    pages: Tensor
    mask: Tensor


class ExtendPlan(NamedTuple):
    """One longer entry: its tokens are ``[first, first + q_len)`` of T and see ``kv_len`` tokens in ``pages``."""

    first: int
    q_len: int
    kv_len: int
    pages: Tensor


class TorchAttention(AttentionBackend):
    """The reference backend."""

    def __init__(self, pool: MHATokenToKVPool, num_heads: int, dtype: torch.dtype) -> None:
        if pool.layout.order != "tokens":
            raise ValueError(f"the torch backend reads KV in token order, not in {pool.layout.order!r}")
        self._pool = pool
        self._page_size = pool.layout.page_size
        self._num_heads = num_heads
        self._dtype = dtype
        self._token_rows = torch.empty(0)
        self._decode: DecodePlan | None = None
        self._extends: list[ExtendPlan] = []
        self._causal_mask = torch.empty(0)

    def plan(self, batch: ForwardBatch) -> None:
        """See the base class."""
        self._token_rows = self._pool.token_rows(batch.out_cache_loc)
        firsts = [0]
        for q_len in batch.q_lens:
            firsts.append(firsts[-1] + q_len)
        short = [b for b, q_len in enumerate(batch.q_lens) if q_len == 1]
        self._decode = self._plan_decode(batch, short, [firsts[b] for b in short]) if short else None
        self._extends = [self._plan_extend(batch, b, firsts[b]) for b, q_len in enumerate(batch.q_lens) if q_len > 1]
        longest = max((entry.kv_len for entry in self._extends), default=0)
        self._causal_mask = _causal_mask(longest, self._dtype, batch.input_ids.device)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See the base class."""
        self._pool.store(layer, self._token_rows, k, v)
        if self._decode is not None and not self._extends:
            return self._run_decode(layer, self._decode, q).flatten(1)
        out_THD = torch.empty_like(q, memory_format=torch.contiguous_format)
        if self._decode is not None:
            tokens = self._decode.tokens
            out_THD[tokens] = self._run_decode(layer, self._decode, q[tokens])
        for entry in self._extends:
            span = slice(entry.first, entry.first + entry.q_len)
            self._run_extend(layer, entry, q[span], out_THD[span])
        return out_THD.flatten(1)

    def _plan_decode(self, batch: ForwardBatch, entries: list[int], tokens: list[int]) -> DecodePlan:
        device = batch.input_ids.device
        index = torch.tensor(tokens, device=device)
        kv_lens = batch.positions[index] + 1
        num_pages = _ceil_div(max(batch.starts[b] + 1 for b in entries), self._page_size)
        table = batch.req_to_token[:, : num_pages * self._page_size : self._page_size]
        table = table.index_select(0, batch.rows[torch.tensor(entries, device=device)])
        first_lane = torch.arange(num_pages, device=device) * self._page_size
        # Beyond a row's end the table holds anything: such lanes read page 0.
        pages = torch.where(first_lane < kv_lens[:, None], table // self._page_size, 0).to(torch.int64)
        lanes = torch.arange(num_pages * self._page_size, device=device)
        mask = torch.zeros(len(entries), lanes.shape[0], dtype=self._dtype, device=device)
        mask.masked_fill_(lanes >= kv_lens[:, None], float("-inf"))
        return DecodePlan(index, pages.flatten(), mask[:, None, None])

    def _plan_extend(self, batch: ForwardBatch, entry: int, first: int) -> ExtendPlan:
        kv_len = batch.starts[entry] + batch.q_lens[entry]
        slots = batch.req_to_token[batch.rows[entry], : kv_len : self._page_size]
        return ExtendPlan(first, batch.q_lens[entry], kv_len, (slots // self._page_size).to(torch.int64))

    def _gather(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self._pool.gather(layer, pages)
        return k.to(self._dtype), v.to(self._dtype)

    def _run_decode(self, layer: int, plan: DecodePlan, q_BHD: Tensor) -> Tensor:
        """Attend from one token of each entry: [B, H, D]."""
        batch, heads, dim = q_BHD.shape
        kv_heads = self._pool.layout.kv_heads
        k, v = self._gather(layer, plan.pages)
        k_BKSD = k.view(batch, -1, kv_heads, dim).transpose(1, 2)
        v_BKSD = v.view(batch, -1, kv_heads, dim).transpose(1, 2)
        q_BKGD = q_BHD.reshape(batch, kv_heads, heads // kv_heads, dim)
        out = F.scaled_dot_product_attention(q_BKGD, k_BKSD, v_BKSD, attn_mask=plan.mask)
        return out.reshape(batch, heads, dim)

    def _run_extend(self, layer: int, entry: ExtendPlan, q_THD: Tensor, out_THD: Tensor) -> None:
        """Attend from all tokens of one entry, into ``out_THD``."""
        k, v = self._gather(layer, entry.pages)
        k_KSD, v_KSD = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        q_HTD = q_THD.transpose(0, 1)[None]
        width = self._causal_mask.shape[1]
        for begin in range(0, entry.q_len, QUERY_BLOCK):
            end = min(begin + QUERY_BLOCK, entry.q_len)
            seen = entry.kv_len - entry.q_len + end
            mask = self._causal_mask[QUERY_BLOCK - (end - begin) :, width - seen :]
            out = F.scaled_dot_product_attention(
                q_HTD[:, :, begin:end], k_KSD[:, :, :seen], v_KSD[:, :, :seen], attn_mask=mask, enable_gqa=True
            )
            out_THD[begin:end] = out[0].transpose(0, 1)


def _causal_mask(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[QUERY_BLOCK, width] whose last query sees every key and each one before sees one key less.

    Its lower right corner of any size masks a block of that many queries over that many keys, whatever came before.
    """
    width = max(width, QUERY_BLOCK)
    mask = torch.zeros(QUERY_BLOCK, width, dtype=dtype, device=device)
    later = torch.ones(QUERY_BLOCK, QUERY_BLOCK, dtype=torch.bool, device=device).triu_(1)
    mask[:, width - QUERY_BLOCK :].masked_fill_(later, float("-inf"))
    return mask


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
