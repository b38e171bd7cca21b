"""Attention in plain torch: correct for any mix of prefill chunks and decode steps, on every device.

A pass's entries part in two. Entries of one token (decode steps, in the main) run as padded batches of a bounded size.
Their pages are gathered into [B, S] lanes. The query heads that share a KV head stand in the query dimension, so that K
and V are never repeated. Longer entries run one by one, in blocks of queries that see no more keys than causality
allows.

Shapes: T tokens of the pass, B entries of one token, S gathered lanes (whole pages), H heads, K KV heads, G = H / K,
D head_dim.

What differs from layer to layer comes with each call. A window is a mask of its own, made when its first layer asks for
it. A soft cap and sinks need the scores themselves, so such layers compute the scores instead of calling torch's own
attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model_files.spec import AttentionSpec, MLASpec
from ..batch.forward_batch import ForwardBatch
from ..kv.pool import KVPool
from .base import AttentionBackend
from .group_pools import group_pools, groups_of_layers

QUERY_BLOCK = 128
MOST_LANES = 1 << 17
"""Maximum gathered lanes of entries of one token that run together, a longer context by itself aside."""


RowPages = list[Tensor]
"""Where rows' tokens lie in the pool of each page group: int64."""


class DecodePlan(NamedTuple):
    """Entries of one token. ``tokens``: [B] indices into T; ``pages``: [B * S / page_size]; ``kv_lens``: [B]."""

    tokens: Tensor
    pages: RowPages
    kv_lens: Tensor
    masks: dict[int | None, Tensor]
    """Masks that layers have asked for, by window."""


class ExtendPlan(NamedTuple):
    """One longer entry: its tokens are ``[first, first + q_len)`` of T and see ``kv_len`` tokens in ``pages``."""

    first: int
    q_len: int
    kv_len: int
    pages: RowPages


class TorchAttention(AttentionBackend):
    """The reference backend."""

    reads_whole_pages = True
    gathered_tokens = MOST_LANES

    def __init__(self, pools: Sequence[KVPool], dtype: torch.dtype) -> None:
        """Prepare attention over ``pools``, one for each page group.

        ``dtype``: type that keys and values are converted to. Raises ``ValueError`` for pools in the order "blocks".
        """
        pool = pools[0]
        if pool.layout.order != "tokens":
            raise ValueError(f"the torch backend reads KV in token order, not in {pool.layout.order!r}")
        self._groups, self._group_of = group_pools(pools), groups_of_layers(pools)
        self._page_size = pool.layout.page_size
        self._dtype = dtype
        self._token_rows: list[Tensor] = []
        self._decodes: list[DecodePlan] = []
        self._extends: list[ExtendPlan] = []
        self._extend_masks: dict[int | None, Tensor] = {}

    def plan(self, batch: ForwardBatch) -> None:
        """Plan padded batches of the one-token entries, and each longer entry by itself, and find where KV is written.

        Drops the masks of the pass before.
        """
        self._token_rows = [group.pool.token_rows(group.slots(batch)) for group in self._groups]
        firsts = [0]
        for q_len in batch.q_lens:
            firsts.append(firsts[-1] + q_len)
        lens = [self._dense_len(batch, b) for b in range(len(batch.q_lens))]
        short = [b for b, q_len in enumerate(lens) if q_len == 1]
        pieces = _divide(short, batch.starts)
        self._decodes = [self._plan_decode(batch, entries, [firsts[b] for b in entries]) for entries in pieces]
        self._extends = [self._plan_extend(batch, b, firsts[b], q_len) for b, q_len in enumerate(lens) if q_len > 1]
        self._extend_masks.clear()

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec | MLASpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write ``k`` and ``v`` into the pool, and return attention over copies of the rows' pages.

        The copies are in the backend's type.
        """
        group = self._group_of[layer]
        self._groups[group].pool.store(layer, self._token_rows[group], k, v)
        if len(self._decodes) == 1 and len(self._decodes[0].tokens) == len(q):
            return self._run_decode(layer, self._decodes[0], q, spec, sinks).flatten(1)
        out_THD = q.new_empty((*q.shape[:2], v.shape[2]))
        for plan in self._decodes:
            out_THD[plan.tokens] = self._run_decode(layer, plan, q[plan.tokens], spec, sinks)
        for entry in self._extends:
            span = slice(entry.first, entry.first + entry.q_len)
            self._run_extend(layer, entry, q[span], out_THD[span], spec, sinks)
        return out_THD.flatten(1)

    def _dense_len(self, batch: ForwardBatch, entry: int) -> int:
        """Return how many of the entry's tokens in this pass attend here, counted from its first: all.

        A subclass may return fewer, and attends with the others itself. ``entry``: index in the batch.
        """
        return batch.q_lens[entry]

    def _plan_decode(self, batch: ForwardBatch, entries: list[int], tokens: list[int]) -> DecodePlan:
        index = torch.tensor(tokens, device=batch.input_ids.device)
        kv_lens = batch.positions[index] + 1
        pages = self._decode_pages(batch, entries, kv_lens, max(batch.starts[b] + 1 for b in entries))
        return DecodePlan(index, self._row_pages(batch, pages, kv_lens[:, None]), kv_lens, {})

    def _decode_pages(self, batch: ForwardBatch, entries: list[int], kv_lens: Tensor, longest: int) -> Tensor:
        """Return the pages that the one token of each of ``entries`` sees: [B, S / page_size] int64.

        They are page numbers of the request table, padded with page 0. ``entries``: indices in the batch. ``kv_lens``
        [B]: tokens that each sees. ``longest``: the largest of these.
        """
        device = batch.input_ids.device
        num_pages = _ceil_div(longest, self._page_size)
        table = batch.req_to_token[:, : num_pages * self._page_size : self._page_size]
        table = table.index_select(0, batch.rows[torch.tensor(entries, device=device)])
        first_lane = torch.arange(num_pages, device=device) * self._page_size
        # Beyond a row's end the table holds anything: such lanes read page 0.
        return torch.where(first_lane < kv_lens[:, None], table // self._page_size, 0).to(torch.int64)

    def _plan_extend(self, batch: ForwardBatch, entry: int, first: int, q_len: int) -> ExtendPlan:
        kv_len = batch.starts[entry] + q_len
        slots = batch.req_to_token[batch.rows[entry], : kv_len : self._page_size]
        pages = self._row_pages(batch, (slots // self._page_size).to(torch.int64), batch.starts[entry] + 1)
        return ExtendPlan(first, q_len, kv_len, pages)

    def _row_pages(self, batch: ForwardBatch, pages: Tensor, seen_by_first: Tensor | int) -> RowPages:
        """Return ``pages`` of the request table as page numbers in the pool of each page group, flattened.

        ``pages``: [..., P], in the order of positions. ``seen_by_first``: tokens that the first query sees. A window
        pool's list has page 0 for pages before that query's window.
        """
        return [group.seen_pages(batch, pages, seen_by_first).flatten() for group in self._groups]

    def _gather(self, layer: int, pages: RowPages) -> tuple[Tensor, Tensor]:
        group = self._group_of[layer]
        k, v = self._groups[group].pool.gather(layer, pages[group])
        return k.to(self._dtype), v.to(self._dtype)

    def _run_decode(
        self, layer: int, plan: DecodePlan, q_BHD: Tensor, spec: AttentionSpec | MLASpec, sinks_H: Tensor | None
    ) -> Tensor:
        """Return the attention in ``layer`` of the plan's entries, one token each: [B, H, D]."""
        batch, heads, dim = q_BHD.shape
        groups = heads // spec.kv_heads
        kept = self._gather(layer, plan.pages)
        k_BKSD, v_BKSD = (x.view(batch, -1, *x.shape[1:]).transpose(1, 2) for x in kept)
        q_BKGD = q_BHD.reshape(batch, spec.kv_heads, groups, dim)
        sinks = None if sinks_H is None else sinks_H.view(spec.kv_heads, 1, groups, 1)
        mask = self._decode_mask(plan, k_BKSD.shape[2], _window(spec))
        return _attend(q_BKGD, k_BKSD, v_BKSD, mask, spec, sinks).reshape(batch, heads, -1)

    def _run_extend(
        self,
        layer: int,
        entry: ExtendPlan,
        q_THD: Tensor,
        out_THD: Tensor,
        spec: AttentionSpec | MLASpec,
        sinks_H: Tensor | None,
    ) -> None:
        """Write the attention in ``layer`` of all tokens of one entry to ``out_THD``."""
        k, v = self._gather(layer, entry.pages)
        k_KSD, v_KSD = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        q_HTD = q_THD.transpose(0, 1)[None]
        sinks = None if sinks_H is None else sinks_H.view(spec.kv_heads, -1, 1, 1)
        causal = self._extend_mask(_window(spec), q_THD.device)
        width = causal.shape[1]
        for begin in range(0, entry.q_len, QUERY_BLOCK):
            end = min(begin + QUERY_BLOCK, entry.q_len)
            seen = entry.kv_len - entry.q_len + end
            mask = causal[QUERY_BLOCK - (end - begin) :, width - seen :]
            out = _attend(q_HTD[:, :, begin:end], k_KSD[:, :, :seen], v_KSD[:, :, :seen], mask, spec, sinks)
            out_THD[begin:end] = out[0].transpose(0, 1)

    def _decode_mask(self, plan: DecodePlan, lanes: int, window: int | None) -> Tensor:
        """Return the mask [B, 1, 1, S] to add to the scores of the plan's rows for ``window``; cached for the pass."""
        if window not in plan.masks:
            lane = torch.arange(lanes, device=plan.kv_lens.device)
            hidden = lane >= plan.kv_lens[:, None]
            if window is not None:
                hidden |= lane < plan.kv_lens[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device)
            plan.masks[window] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return plan.masks[window]

    def _extend_mask(self, window: int | None, device: torch.device) -> Tensor:
        if window not in self._extend_masks:
            longest = max(entry.kv_len for entry in self._extends)
            self._extend_masks[window] = _causal_mask(longest, window, self._dtype, device)
        return self._extend_masks[window]


def _divide(entries: list[int], starts: list[int]) -> list[list[int]]:
    """Divide ``entries`` of one token into batches that each run together.

    A batch gathers up to ``MOST_LANES`` KV positions, padded to its longest entry, or is a single entry. ``starts``:
    tokens of each entry of the pass before its own.
    """
    pieces: list[list[int]] = []
    longest = 0
    for entry in entries:
        longest = max(longest, starts[entry] + 1)
        if pieces and (len(pieces[-1]) + 1) * longest <= MOST_LANES:
            pieces[-1].append(entry)
        else:
            pieces.append([entry])
            longest = starts[entry] + 1
    return pieces


def _window(spec: AttentionSpec | MLASpec) -> int | None:
    return None if isinstance(spec, MLASpec) else spec.window


def _attend(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    mask: Tensor,
    spec: AttentionSpec | MLASpec,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention [B, H, T, D]. ``mask`` is added to the scores and fits [B, 1, T, S].

    ``sinks`` fit [K, G, T, 1]; None: the layer has none.
    """
    if isinstance(spec, MLASpec) or (spec.softcap is None and sinks is None):
        grouped = q_BHTD.shape[1] != k_BKSD.shape[1]
        return F.scaled_dot_product_attention(
            q_BHTD, k_BKSD, v_BKSD, attn_mask=mask, scale=spec.scale, enable_gqa=grouped
        )
    batch, heads, tokens, dim = q_BHTD.shape
    kv_heads = k_BKSD.shape[1]
    q_BKGTD = q_BHTD.reshape(batch, kv_heads, heads // kv_heads, tokens, dim)
    scores = (q_BKGTD @ k_BKSD[:, :, None].transpose(-1, -2) * spec.scale).float()
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    scores = scores + (mask if mask.dim() == 2 else mask[:, None])
    weights = (scores.softmax(-1) if sinks is None else _softmax_with_sinks(scores, sinks)).to(v_BKSD.dtype)
    return (weights @ v_BKSD[:, :, None]).reshape(batch, heads, tokens, dim)


def _softmax_with_sinks(scores_BKGTS: Tensor, sinks: Tensor) -> Tensor:
    """Return each row's softmax over its scores and its sink, without the sink's column: it sums to less than 1."""
    columns = sinks.expand(*scores_BKGTS.shape[:-1], 1)
    return torch.cat((scores_BKGTS, columns), -1).softmax(-1)[..., :-1]


def _causal_mask(width: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a mask [QUERY_BLOCK, width] to add to scores: 0 for keys that a query sees, -inf for the others.

    The last query sees the last ``window`` keys, or all without a window. That of each earlier query ends, and begins,
    one key earlier. The lower right corner of any size masks a block of that many queries over
    that many keys.
    """
    width = max(width, QUERY_BLOCK)
    hidden = torch.ones(QUERY_BLOCK, width, dtype=torch.bool, device=device).triu_(width - QUERY_BLOCK + 1)
    if window is not None:
        hidden |= torch.ones_like(hidden).tril_(width - QUERY_BLOCK - window)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
