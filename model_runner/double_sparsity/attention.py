"""Attention that, for each token that is generated, looks at the labels of all tokens and at few of the tokens.

"Double sparsity" (Yang et al., 2024, arXiv 2408.07092): a query's channels of the label, times the labels of its row's
tokens, are scores near enough to choose by. Each query head takes the ``heavy_tokens`` with the highest, ``RECENT`` of
them always the row's last, and attends to these alone, exactly. A prompt attends in full.

What a token computes depends on its row alone: on its position, and on where the row's prompt ends, whether it is
computed in a step of its own, beside others, or once more in a piece with its neighbours (after a retraction). Ties of
scores go to the later token, on every device and beside whatever else. A row of no more tokens than are chosen, or than
``threshold``, attends in full.

Shapes: N tokens that choose, K KV heads, G query heads of each, D head_dim, M pages of the longest row and S lanes of
them, J = heavy_tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model_files.spec import AttentionSpec, MLASpec
from ...runtime.options import RECENT_TOKENS
from ..attention.torch_backend import TorchAttention
from ..forward_batch import ForwardBatch
from .pool import SparseTokenToKVPool

MOST_LANES = 1 << 17
"""Of tokens that choose together: what is gathered of their labels stays of a bounded size."""


class Choosers(NamedTuple):
    """Tokens that choose together. ``tokens``: [N] indices into the pass; ``pages``: [N, M]."""

    tokens: Tensor
    pages: Tensor
    hidden: Tensor
    """[N, 1, 1, S]: lanes behind the token."""
    recent: Tensor
    """[N, 1, 1, S]: lanes that are chosen in any case."""


class DoubleSparsityAttention(TorchAttention):
    """The torch backend over a pool with labels."""

    def __init__(self, pool: SparseTokenToKVPool, dtype: torch.dtype, heavy_tokens: int, threshold: int = 0) -> None:
        """``heavy_tokens``: J. ``threshold``: rows that are no longer attend in full."""
        super().__init__(pool, dtype)
        self._labelled = pool
        self._heavy_tokens = heavy_tokens
        self._full = max(heavy_tokens, threshold)
        self._choosers: list[Choosers] = []

    def plan(self, batch: ForwardBatch) -> None:
        """See the base class."""
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
        together = max(1, MOST_LANES // max(kv_lens, default=1))
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
        """See the base class."""
        out = super().forward(layer, q, k, v, spec, sinks)
        for choosers in self._choosers:
            chosen = self._run_sparse(layer, choosers, q.index_select(0, choosers.tokens), spec)
            out.index_copy_(0, choosers.tokens, chosen)
        return out

    def _dense_len(self, batch: ForwardBatch, entry: int) -> int:
        """Of the entry's tokens, how many attend in full: those of the prompt, and where the row is short."""
        start, q_len = batch.starts[entry], batch.q_lens[entry]
        prompt_len = start if q_len == 1 else start + q_len
        if batch.prompt_lens is not None:
            prompt_len = batch.prompt_lens[entry]
        return min(q_len, max(0, max(prompt_len, self._full) - start))

    def _plan_choosers(self, batch: ForwardBatch, tokens: list[int], entries: list[int], longest: int) -> Choosers:
        device, size = batch.input_ids.device, self._page_size
        index = torch.tensor(tokens, device=device)
        kv_lens = batch.positions[index] + 1
        pages = self._decode_pages(batch, entries, kv_lens, longest)
        lane = torch.arange(pages.shape[1] * size, device=device)
        hidden = lane >= kv_lens[:, None]
        recent = ~hidden & (lane >= kv_lens[:, None] - RECENT_TOKENS)
        return Choosers(index, pages, hidden[:, None, None], recent[:, None, None])

    def _run_sparse(self, layer: int, choosers: Choosers, q_NHD: Tensor, spec: AttentionSpec | MLASpec) -> Tensor:
        """[N, H * D]."""
        count, _, dim = q_NHD.shape
        q_NKGD = q_NHD.view(count, spec.kv_heads, -1, dim)
        lanes_NKGJ = self._choose(layer, choosers, q_NKGD)
        lanes_NKM = lanes_NKGJ.flatten(2)
        places = torch.arange(count, device=q_NHD.device)[:, None, None]
        pages = choosers.pages[places, lanes_NKM // self._page_size]
        keys, values = self._labelled.gather_heads(layer, pages, lanes_NKM % self._page_size)
        shape = (-1, 1, self._heavy_tokens, dim)
        k, v = (x.to(self._dtype).view(shape) for x in (keys, values))
        return F.scaled_dot_product_attention(q_NKGD.reshape(-1, 1, 1, dim), k, v, scale=spec.scale).view(count, -1)

    def _choose(self, layer: int, choosers: Choosers, q_NKGD: Tensor) -> Tensor:
        """Of each query head, the lanes to attend to, in order: [N, K, G, J] int64."""
        labels_NKSC = self._labelled.gather_labels(layer, choosers.pages).to(q_NKGD.dtype)
        scores = (self._labelled.label(layer, q_NKGD) @ labels_NKSC.transpose(-1, -2)).float()
        # What is no number must come into the result, where it is found: it is among the chosen.
        scores.masked_fill_(scores.isnan() | choosers.recent, float("inf")).masked_fill_(choosers.hidden, -float("inf"))
        return _highest(scores, self._heavy_tokens)


def _highest(scores: Tensor, count: int) -> Tensor:
    """Indices [..., count] of the highest of ``scores`` [..., S] float32, ascending; of equal ones the last.

    ``topk`` leaves open which of equal ones it takes. So the scores become whole numbers of the same order, with the
    index behind them.
    """
    bits = scores.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    lanes = torch.arange(scores.shape[-1], device=scores.device)
    found = ((ordered.long() << 32) | lanes).topk(count, -1, sorted=False).values
    return (found & 0xFFFFFFFF).sort(-1).values
