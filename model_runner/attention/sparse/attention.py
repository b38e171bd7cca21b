"""Attention that, for each generated token, reads the labels of all tokens and only a few of the tokens.

"Double sparsity" (Yang et al., 2024, arXiv 2408.07092): a query's channels of the label, times the labels of its row's
tokens, are approximate scores. Each query head takes the ``heavy_tokens`` with the highest scores and attends to these
alone, exactly. ``RECENT_TOKENS`` of them are always the row's last. A prompt attends in full.

What a token computes depends on its row alone: on its position, and on where the row's prompt ends. It may be computed
in a step of its own, beside others, or again in a piece with its neighbours (after a retraction). Ties of scores go to
the later token, on every device and in any company. A row of no more tokens than are chosen, or than ``threshold``,
attends in full.

Shapes: N tokens that choose, K KV heads, G query heads of each, D head_dim, M pages of the longest row and S lanes of
them, J = heavy_tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....model_files.spec import AttentionSpec, MLASpec
from ...batch.forward_batch import ForwardBatch
from ...kv.sparse.pool import SparseTokenToKVPool
from ...options import RECENT_TOKENS
from ..torch_backend import TorchAttention

MOST_LANES = 1 << 17
"""Maximum lanes of the tokens that choose together, which bounds the memory of what is gathered for them.

A chosen token counts as four lanes.
"""
LANE_BITS = (1 << 32) - 1
HIGHEST, LOWEST, LARGEST = 0x7FFFFFFF << 32, -(1 << 63), (1 << 63) - 1
"""Sort keys: the highest and the lowest without their lanes, and the largest number."""


class Choosers(NamedTuple):
    """Tokens that choose together. ``tokens``: [N] indices into the pass.

    ``label_rows`` [N, K, M] and ``lane_rows`` [N, S]: see the pool. ``least`` and ``most`` ([N, 1, 1, S] int64) bound
    the keys of ``_keys``. Lanes after the token get the lowest key of all. The last lanes that it sees get the highest.
    """

    tokens: Tensor
    label_rows: Tensor
    lane_rows: Tensor
    least: Tensor
    most: Tensor


class DoubleSparsityAttention(TorchAttention):
    """The torch backend over a pool with labels."""

    def __init__(self, pool: SparseTokenToKVPool, dtype: torch.dtype, heavy_tokens: int, threshold: int = 0) -> None:
        """Set up sparse attention over ``pool``, in which a generated token attends to ``heavy_tokens`` tokens.

        Rows of at most ``threshold`` tokens attend in full. ``dtype``: type that keys and
        values are converted to.
        """
        super().__init__([pool], dtype)
        self._labelled = pool
        self._heavy_tokens = heavy_tokens
        self._full = max(heavy_tokens, threshold)
        self._choosers: list[Choosers] = []

    def plan(self, batch: ForwardBatch) -> None:
        """Plan full attention for prompts and short rows, and sparse attention for the other tokens, in groups.

        A group gathers at most ``MOST_LANES`` KV positions, unless it is a single token.
        """
        super().plan(batch)
        tokens: list[int] = []
        entries: list[int] = []
        kv_lens: list[int] = []
        first = 0
        for b, (start, q_len) in enumerate(zip(batch.starts, batch.q_lens, strict=True)):
            dense = self._dense_len(batch, b)
            tokens += range(first + dense, first + q_len)
            entries += [b] * (q_len - dense)
            kv_lens += range(start + dense + 1, start + q_len + 1)
            first += q_len
        together = max(1, MOST_LANES // max(4 * self._heavy_tokens, *kv_lens, 1))
        spans = (slice(i, i + together) for i in range(0, len(tokens), together))
        self._choosers = [self._plan_choosers(batch, tokens[s], entries[s], max(kv_lens[s])) for s in spans]

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec | MLASpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store and attend as the torch backend does, then replace the output of tokens that attend sparsely."""
        out = super().forward(layer, q, k, v, spec, sinks)
        for choosers in self._choosers:
            chosen = self._run_sparse(layer, choosers, q.index_select(0, choosers.tokens), spec)
            out.index_copy_(0, choosers.tokens, chosen)
        return out

    def _dense_len(self, batch: ForwardBatch, entry: int) -> int:
        """Return how many of the entry's tokens in this pass attend in full, counted from its first.

        They are those of the prompt, and those at positions below the length up to which rows attend in full. The
        entry's other tokens attend sparsely. ``entry``: index in the batch.
        """
        start, q_len = batch.starts[entry], batch.q_lens[entry]
        prompt_len = start if q_len == 1 else start + q_len
        if batch.prompt_lens is not None:
            prompt_len = batch.prompt_lens[entry]
        return min(q_len, max(0, max(prompt_len, self._full) - start))

    def _plan_choosers(self, batch: ForwardBatch, tokens: list[int], entries: list[int], longest: int) -> Choosers:
        device = batch.input_ids.device
        index = torch.tensor(tokens, device=device)
        kv_lens = batch.positions[index] + 1
        pages = self._decode_pages(batch, entries, kv_lens, longest)
        lane = torch.arange(pages.shape[1] * self._page_size, device=device)
        is_hidden = lane >= kv_lens[:, None]
        is_recent = ~is_hidden & (lane >= kv_lens[:, None] - RECENT_TOKENS)
        least = torch.where(is_recent, HIGHEST + lane, LOWEST)[:, None, None]
        most = torch.where(is_hidden, LOWEST + lane, LARGEST)[:, None, None]
        pool = self._labelled
        return Choosers(index, pool.label_rows(pages), pool.lane_rows(pages), least, most)

    def _run_sparse(self, layer: int, choosers: Choosers, q_NHD: Tensor, spec: AttentionSpec | MLASpec) -> Tensor:
        """Return the attention of the tokens in ``choosers`` to the tokens that each chooses, [N, H * D]."""
        count, _, dim = q_NHD.shape
        q_NKGD = q_NHD.view(count, spec.kv_heads, -1, dim)
        lanes = self._choose(layer, choosers, q_NKGD).flatten(2)
        rows = choosers.lane_rows[:, None].expand(-1, spec.kv_heads, -1).gather(-1, lanes)
        k, v = (x.float().view(-1, self._heavy_tokens, dim) for x in self._labelled.gather_heads(layer, rows))
        # Few tokens for each of many heads, in float32: torch's own attention takes several times as long for that.
        weights = torch.bmm(q_NKGD.reshape(-1, 1, dim).float(), k.transpose(1, 2)).mul_(spec.scale).softmax(-1)
        return torch.bmm(weights, v).view(count, -1).to(q_NHD.dtype)

    def _choose(self, layer: int, choosers: Choosers, q_NKGD: Tensor) -> Tensor:
        """Return the positions in its row that each query head attends to, best first: [N, K, G, J] int64.

        They have the highest scores by labels, a few channels of each key. The latest positions are always among them.
        ``choosers``: the tokens that ask, with the rows of the pool that they read.
        """
        labels = self._labelled.gather_labels(layer, choosers.label_rows).to(q_NKGD.dtype)
        scores = torch.bmm(self._labelled.label(layer, q_NKGD).flatten(0, 1), labels.transpose(1, 2))
        keys = _keys(scores.float()).view(*q_NKGD.shape[:3], -1).clamp_(choosers.least, choosers.most)
        return _highest(keys, self._heavy_tokens, self._page_size).bitwise_and_(LANE_BITS)


def _keys(scores: Tensor) -> Tensor:
    """Return int64 keys [..., S] that sort as ``scores`` [..., S] float32 (overwritten) do; later positions win ties.

    The lower 32 bits are the position: ``topk`` does not define which of equal scores it takes. NaN sorts highest, so
    it gets into the result, where it is found.
    """
    infinity = float("inf")
    bits = scores.nan_to_num_(nan=infinity, posinf=infinity, neginf=-infinity).view(torch.int32)
    ordered = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    lanes = torch.arange(scores.shape[-1], device=scores.device)
    return ordered.long().bitwise_left_shift_(32).bitwise_or_(lanes)


def _highest(keys: Tensor, count: int, block: int) -> Tensor:
    """Return the ``count`` highest of ``keys`` [..., S], highest first.

    All keys differ, and S is a multiple of ``block``. Long rows are first cut to the ``count`` blocks of ``block`` keys
    with the highest maxima, as the highest keys lie there.
    """
    if block > 1 and keys.shape[-1] > 2 * count * block:
        blocks = keys.view(*keys.shape[:-1], -1, block)
        best = blocks.amax(-1).topk(count, -1, sorted=False).indices
        keys = blocks.gather(-2, best[..., None].expand(*best.shape, block)).flatten(-2)
    # In order: the same sums for a row, whatever is beside it.
    return keys.topk(count, -1).values
