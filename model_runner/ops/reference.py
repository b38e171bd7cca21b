"""The arithmetic of a layer in plain torch: right on every device, and what faster kernels are tested against.

Shapes: T tokens, H heads, D head_dim, I intermediate size, N rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model_files.spec import Activation

CLAMPED_GAIN = 1.702
"""Gain of the sigmoid in GPT-OSS's activation."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x`` [T, in] times ``weight`` [out, in] transposed, plus ``bias`` [out]: [T, out]."""
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x`` [..., N] divided by its root mean square along N, times ``weight`` [N].

    ``eps`` is added to the mean square.
    """
    return F.rms_norm(x, weight.shape, weight, eps)


def rope(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Return ``x_THD`` with each head rotated: element ``i`` pairs with ``i + D / 2``.

    ``cos_TD`` and ``sin_TD`` are [T, 1, D] in the type of ``x_THD``; the first half of ``sin_TD`` is negated already.
    """
    return torch.addcmul(x_THD * cos_TD, x_THD.roll(x_THD.shape[-1] // 2, -1), sin_TD)


def gate_and_mul(x: Tensor, activation: Activation) -> Tensor:
    """Return ``activation(gate) * up`` [T, I] for ``x`` = [gate, up] [T, 2 I]."""
    gate, up = x.chunk(2, -1)
    match activation:
        case Activation.SILU:
            return F.silu(gate).mul_(up)
        case Activation.GELU:
            return F.gelu(gate).mul_(up)
        case Activation.GELU_TANH:
            return F.gelu(gate, approximate="tanh").mul_(up)


def clamped_gate_and_mul(x: Tensor, limit: float) -> Tensor:
    """Return GPT-OSS's gated activation (see ``ExpertsSpec.limit``) of ``x`` = [gate, up], [T, 2 I]: [T, I]."""
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate.mul_((gate * CLAMPED_GAIN).sigmoid_()).mul_(up.add_(1))


def store_kv(pool_rows: Tensor, key_rows: Tensor, value_rows: Tensor, k: Tensor, v: Tensor) -> None:
    """Write ``k`` and ``v`` [T, H, D] into rows of the pool, converted to its type.

    ``pool_rows``: the pool as [N, H * D]. ``key_rows``, ``value_rows``: int64 [T], the row of each token.
    """
    width = pool_rows.shape[1]
    pool_rows.index_copy_(0, key_rows, k.reshape(-1, width).to(pool_rows.dtype))
    pool_rows.index_copy_(0, value_rows, v.reshape(-1, width).to(pool_rows.dtype))
