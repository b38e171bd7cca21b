"""Rows to draw tokens from, and the draws that no row's logits change the way of: nothing here waits for a device.

Shapes: N rows, V vocabulary, K candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .inverse_cdf import pick, pick_few, uniforms
from .penalties import I64, Upload
from .rows import RowParams
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
        """``max_N``: each row's largest logit."""

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
        """Some of them."""
        if len(which) == len(self.logits_NV):
            return self
        index = torch.from_numpy(which).to(self.logits_NV.device) if upload is None else upload(which)
        return DrawnRows(*(column.index_select(0, index) for column in self))

    def drops_tail(self) -> bool:
        """Return whether min-p may drop tokens of any row. This waits for the device."""
        return bool(self.min_p_N1.any())

    def least_weights(self, best_N1: Tensor) -> Tensor:
        """Return the weights below which min-p drops tokens. ``best_N1``: the weight of each row's best token."""
        return self.min_p_N1 * best_N1

    def scaled(self, logits_NM: Tensor) -> Tensor:
        """Logits over temperature, the largest 0. Subtracting first keeps a small temperature exact."""
        return (logits_NM - self.max_N1).div_(self.temperature_N1)


def drop_tails(params: RowParams) -> npt.NDArray[np.bool_]:
    """Return whether min-p may drop tokens, for each row."""
    return np.asarray(params["min_p"] > 0)


def from_all(rows: DrawnRows, *, drops_tail: bool) -> Tensor:
    """No top-k, no top-p. ``drops_tail``: whether ``least_weights`` may drop tokens."""
    weights_NV = torch.softmax(rows.scaled(rows.logits_NV), 1)
    if drops_tail:
        zero_below(weights_NV, rows.least_weights(weights_NV.amax(1, keepdim=True)))
    return pick(weights_NV, rows.uniforms_N)


def from_top_k(rows: DrawnRows) -> Tensor:
    """A small top-k: nothing but the candidates is ever looked at."""
    best = top_tokens(rows.logits_NV, CANDIDATES)
    ranks_K = torch.arange(best.ids.shape[1], device=best.ids.device)
    scaled_NK = rows.scaled(best.values).masked_fill_(ranks_K >= rows.top_k_N1, -torch.inf)
    return from_candidates(rows, torch.softmax(scaled_NK, 1), best.ids)


def from_candidates(rows: DrawnRows, weights_NK: Tensor, ids_NK: Tensor) -> Tensor:
    """Top-p and min-p over candidates (best first, weights of a sum of 1 or, for top-p alone, of the vocabulary's)."""
    before_NK = weights_NK.cumsum(1, dtype=torch.float64) - weights_NK
    keep_NK = (before_NK < rows.top_p_N1) & (weights_NK >= rows.least_weights(weights_NK[:, :1]))
    keep_NK[:, 0] = True
    by_id = ids_NK.sort(dim=1)
    kept_NK = weights_NK.masked_fill(~keep_NK, 0.0).gather(1, by_id.indices)
    return by_id.values.gather(1, pick_few(kept_NK, rows.uniforms_N).unsqueeze(1)).squeeze(1)


def zero_below(weights_NV: Tensor, border_N1: Tensor) -> Tensor:
    """Zero the weights below the border, in place; [N] int64, how many are left."""
    # Comparing into floats and multiplying is vectorised, which masks of bools are not: a tenth of the time.
    keep_NV = torch.ge(weights_NV, border_N1, out=torch.empty_like(weights_NV))
    weights_NV.mul_(keep_NV)
    return keep_NV.sum(1).to(torch.int64)
