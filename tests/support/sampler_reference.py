"""The sampler's rules in float64, with full sorts: what tests of samplers compare with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pdserve.messages.sampling import SamplingParams
from pdserve.messages.worker import RowInit
from pdserve.model_runner.sampling.inverse_cdf import uniforms

BORDER = 1e-5
"""Margin of a choice below which it may differ by the rounding of float32."""


def make_row(row: int = 0, prompt_len: int = 4, **changes) -> RowInit:
    """Make a row from fields of ``RowInit`` and of its ``sampling``, by their names."""
    sampling = {"seed": 7} | {name: changes.pop(name) for name in SamplingParams.__struct_fields__ if name in changes}
    return RowInit(row, prompt_len, SamplingParams(**sampling), **changes)


class Choice(NamedTuple):
    token: int
    margin: float
    """Distance of the row's uniform number, or of a cut's border, from where the answer changes."""


def reference(logits: np.ndarray, init: RowInit, position: int) -> Choice:
    """Choose a token as the sampler's module docstring describes, in float64, with full sorts."""
    sampling = init.sampling
    x = edited_reference(logits.astype(np.float64), init, position)
    order = np.lexsort((np.arange(len(x)), -x))
    if sampling.temperature == 0 or sampling.top_k == 1:
        return Choice(int(order[0]), 1.0)
    p = np.exp((x - x.max()) / sampling.temperature)
    p /= p.sum()
    kept = order[: sampling.top_k] if sampling.top_k > 0 else order
    margin = 1.0
    q = p[kept] / p[kept].sum()
    if sampling.top_p < 1:
        before = np.cumsum(q) - q
        margin = np.abs(before - sampling.top_p).min()
        kept, q = kept[before < sampling.top_p], q[before < sampling.top_p]
    if sampling.min_p > 0:
        margin = min(margin, np.abs(q / q[0] - sampling.min_p).min())
        kept = kept[q >= sampling.min_p * q[0]]
    kept = np.sort(kept)
    cumulative = np.cumsum(p[kept]) / p[kept].sum()
    u = uniforms(np.array([sampling.seed], dtype=np.uint64), np.array([position]))[0]
    margin = min(margin, np.abs(cumulative[:-1] - u).min(initial=1.0))
    return Choice(int(kept[np.searchsorted(cumulative, u, side="right")]), float(margin))


def edited_reference(x: np.ndarray, init: RowInit, position: int) -> np.ndarray:
    sampling = init.sampling
    for token, bias in sampling.logit_bias.items():
        if token < len(x):
            # As it is done, in float32: under a small temperature even its rounding changes what is likely.
            x[token] = np.float32(x[token]) + np.float32(bias)
    if init.history is not None:
        tokens = np.frombuffer(init.history, dtype="<i4")
        output = tokens[init.prompt_len :]
        for token in set(tokens.tolist()):
            x[token] = (
                x[token] / sampling.repetition_penalty if x[token] > 0 else x[token] * sampling.repetition_penalty
            )
        for token in set(output.tolist()):
            x[token] -= sampling.frequency_penalty * (output == token).sum() + sampling.presence_penalty
    if position - init.prompt_len < sampling.min_new_tokens:
        x[[t for t in init.stop_ids if t < len(x)]] = -np.inf
    return x
