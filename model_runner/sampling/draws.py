"""The rules of top-k, top-p and min-p in torch, which the samplers of a CPU and of a device share.

Nothing here waits for a device, but ``DrawnRows.drops_tail``. ``cpu_engine/src/sampling.cpp`` and
``sampling/triton/draw_choice.py`` have the same rules.

Shapes: N rows, V vocabulary, K candidates, S sorted weights.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .inverse_cdf import pick, pick_few, uniforms
from .logit_edits.base import Upload
from .row_params import I64, RowParams
from .top_tokens import top_tokens

# A nucleus is looked for among this many best tokens first (their ids are found cheaply), then in the sorted
# probabilities.
CANDIDATES = 64


class DrawnRows(NamedTuple):
    """Rows to draw from, all finite."""

    logits_NV: Tensor
    max_N1: Tensor
    temperature_N1: Tensor
    top_k_N1: Tensor
    top_p_N1: Tensor
    min_p_N1: Tensor
    uniforms_N: Tensor

    @classmethod
    def of(
        cls, logits_NV: Tensor, max_N: Tensor, params: RowParams, positions: I64, upload: Upload | None = None
    ) -> DrawnRows:
        """Return the parameters and the uniform numbers for drawing tokens at ``positions`` [N] from ``logits_NV``.

        ``max_N``: each row's largest logit. ``upload`` puts arrays where the logits are; None: copy them and wait.
        """

        def column(values: npt.NDArray[np.generic]) -> Tensor:
            there = torch.from_numpy(values.copy()).to(logits_NV.device) if upload is None else upload(values)
            return there.unsqueeze(1)

        return cls(
            logits_NV,
            max_N.unsqueeze(1),
            column(params["temperature"]),
            column(params["top_k"]),
            column(params["top_p"]),
            column(params["min_p"]),
            column(uniforms(params["seed"], positions)).squeeze(1),
        )

    def take(self, which: npt.NDArray[np.intp], upload: Upload | None = None) -> DrawnRows:
        """Return the rows at the indices ``which``, or these rows themselves if ``which`` has as many.

        ``upload`` puts ``which`` where the logits are; None: copy it and wait.
        """
        if len(which) == len(self.logits_NV):
            return self
        index = torch.from_numpy(which).to(self.logits_NV.device) if upload is None else upload(which)
        return DrawnRows(*(column.index_select(0, index) for column in self))

    def drops_tail(self) -> bool:
        """Return whether min-p is set for any row. This waits for the device."""
        return bool(self.min_p_N1.any())

    def least_weights(self, best_N1: Tensor) -> Tensor:
        """Return the weights [N, 1] below which min-p drops tokens: min-p times the weight of the row's best token.

        ``best_N1``: these best weights. The result has zeros for rows without min-p.
        """
        return self.min_p_N1 * best_N1

    def scaled(self, logits_NM: Tensor) -> Tensor:
        """Return (logit - the row's largest) / temperature. Subtracting first keeps a small temperature exact."""
        return (logits_NM - self.max_N1).div_(self.temperature_N1)


def drop_tails(params: RowParams) -> npt.NDArray[np.bool_]:
    """Return for each row whether min-p is set, so that it may drop tokens: [N] bool."""
    return np.asarray(params["min_p"] > 0)


def from_all(rows: DrawnRows, *, drops_tail: bool) -> Tensor:
    """Draw a token for each row among the whole vocabulary, without top-k and top-p: [N] int64.

    ``drops_tail``: whether min-p may drop tokens of any row.
    """
    weights_NV = torch.softmax(rows.scaled(rows.logits_NV), 1)
    if drops_tail:
        zero_below(weights_NV, rows.least_weights(weights_NV.amax(1, keepdim=True)))
    return pick(weights_NV, rows.uniforms_N)


def from_top_k(rows: DrawnRows) -> Tensor:
    """Draw a token for each row with top-k of at most ``CANDIDATES``, reading only the best tokens: [N] int64.

    Top-p and min-p apply as well.
    """
    best = top_tokens(rows.logits_NV, CANDIDATES)
    ranks_K = torch.arange(best.ids.shape[1], device=best.ids.device)
    scaled_NK = rows.scaled(best.values).masked_fill_(ranks_K >= rows.top_k_N1, -torch.inf)
    return from_candidates(rows, torch.softmax(scaled_NK, 1), best.ids)


def from_candidates(rows: DrawnRows, weights_NK: Tensor, ids_NK: Tensor) -> Tensor:
    """Draw a token of each row by top-p and min-p over its candidates: [N] int64.

    ``weights_NK``, ``ids_NK``: candidates, best first. Weights sum to 1 or, if there is top-p alone, are the tokens'
    shares of the whole vocabulary.
    """
    before_NK = weights_NK.cumsum(1, dtype=torch.float64) - weights_NK
    keep_NK = (before_NK < rows.top_p_N1) & (weights_NK >= rows.least_weights(weights_NK[:, :1]))
    keep_NK[:, 0] = True
    by_id = ids_NK.sort(dim=1)
    kept_NK = weights_NK.masked_fill(~keep_NK, 0.0).gather(1, by_id.indices)
    return by_id.values.gather(1, pick_few(kept_NK, rows.uniforms_N).unsqueeze(1)).squeeze(1)


def from_sorted(rows: DrawnRows) -> Tensor:
    """Draw a token for each row with any top-k, top-p and min-p, by sorting all of its logits: [N] int64.

    Equal logits are ordered by id.
    """
    weights_NV = torch.softmax(rows.scaled(rows.logits_NV), 1)
    ids_NV = rows.logits_NV.sort(dim=1, descending=True, stable=True).indices
    sorted_NV, vocab = weights_NV.gather(1, ids_NV), weights_NV.shape[1]
    cumulative_NV = sorted_NV.cumsum(1, dtype=torch.float64)
    limit_N1 = torch.where(rows.top_k_N1 > 0, rows.top_k_N1, vocab)
    total_N1 = torch.where(rows.top_k_N1 > 0, cumulative_NV.gather(1, limit_N1 - 1), 1.0)
    ranks_V = torch.arange(vocab, device=weights_NV.device)
    keep_NV = (cumulative_NV - sorted_NV < rows.top_p_N1 * total_N1) & (ranks_V < limit_N1)
    keep_NV &= sorted_NV >= rows.least_weights(sorted_NV[:, :1])
    keep_NV[:, :1].fill_(True)
    kept_NV = torch.zeros_like(weights_NV).scatter_(1, ids_NV, sorted_NV * keep_NV)
    return pick(kept_NV, rows.uniforms_N)


class KeptCounts(NamedTuple):
    """Weights that the cuts keep of N rows."""

    count_N: Tensor
    """Number of the largest weights that are kept."""
    border_N: Tensor
    """The smallest of them."""
    certain_N: Tensor
    """Whether the weights that were not looked at change nothing."""


def find_kept(rows: DrawnRows, weights_NV: Tensor, size: int) -> KeptCounts:
    """Return how many of each row's largest weights remain after top-k, top-p and min-p, and the smallest of these.

    Only the ``size`` largest weights of each row are looked at; ``certain_N`` tells whether they suffice.
    """
    size = min(size, weights_NV.shape[1])
    sorted_NS = _largest(weights_NV, size)
    cumulative_NS = sorted_NS.cumsum(1, dtype=torch.float64)
    last_N1 = torch.where(rows.top_k_N1 > 0, rows.top_k_N1, size).clamp(max=size) - 1
    total_N1 = torch.where(rows.top_k_N1 > 0, cumulative_NS.gather(1, last_N1), 1.0)
    ranks_S = torch.arange(size, device=weights_NV.device)
    keep_NS = (cumulative_NS - sorted_NS < rows.top_p_N1 * total_N1) & (ranks_S <= last_N1)
    keep_NS &= sorted_NS >= rows.least_weights(sorted_NS[:, :1])
    count_N = keep_NS.sum(1).clamp(min=1)
    border_N = sorted_NS.gather(1, count_N.unsqueeze(1) - 1).squeeze(1)
    all_seen_N = torch.where(rows.top_k_N1 > 0, rows.top_k_N1 <= size, (count_N < size).unsqueeze(1)).squeeze(1)
    return KeptCounts(count_N, border_N, all_seen_N)


def _largest(weights_NV: Tensor, size: int) -> Tensor:
    """Return the ``size`` largest weights of each row, largest first; ``size`` is at most V."""
    if weights_NV.device.type != "cpu":
        return weights_NV.topk(size, dim=1).values
    # NumPy sorts float32 with vector instructions, 30 times faster than torch on a CPU.
    first = weights_NV.shape[1] - size
    largest = np.partition(weights_NV.numpy(), first, axis=1)[:, first:] if first else weights_NV.numpy().copy()
    largest.sort(axis=1)
    return torch.from_numpy(largest[:, ::-1].copy())


def zero_below(weights_NV: Tensor, border_N1: Tensor) -> Tensor:
    """Set weights below each row's border to zero, in place.

    Return how many weights of each row are at or above its border ([N] int64).
    """
    # Comparing into floats and multiplying is vectorised, which masks of bools are not: a tenth of the time.
    keep_NV = torch.ge(weights_NV, border_N1, out=torch.empty_like(weights_NV))
    weights_NV.mul_(keep_NV)
    return keep_NV.sum(1).to(torch.int64)
