"""Experts all at once, by ``grouped_gemm.py``: the host does not learn the tokens' choices and does not wait.

What lies between the kernels is allocated anew for each call. While a graph is captured, that is memory of the graph's
own, at addresses that stay with it. Otherwise it is the allocator's, and the next layer takes it again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layers.expert_networks import ExpertNetworks
from .triton.grouped_gemm import (
    BLOCK_M,
    ExpertWeights,
    combine,
    experts_down,
    experts_up,
    make_blocks,
    sort_pairs,
)

MOST_PAIRS = 16384
"""Pairs of a token and an expert at a time: of longer chunks the sums of all would take gigabytes."""


def group_experts(x_TN: Tensor, networks: ExpertNetworks, experts_TC: Tensor, weights_TC: Tensor) -> Tensor:
    """Return the weighted sum of each token's chosen experts, [T, N] float32, by kernels for all experts at once.

    ``experts_TC``, ``weights_TC``: each token's experts and their weights in the sum. The experts' own weights must be
    floats. The host does not wait. A row's result has the same bits in every batch.
    """
    gate_up, down = networks.gate_up_proj, networks.down_proj
    weights = ExpertWeights(gate_up.weight, down.weight, gate_up.bias, down.bias)
    sum_TN = torch.empty(x_TN.shape, dtype=torch.float32, device=x_TN.device)
    experts_TC, weights_TC = experts_TC.contiguous(), weights_TC.contiguous()
    # Whole sixteens, so that each part begins where Triton takes its addresses for aligned, and compiles nothing anew.
    most = max(MOST_PAIRS // networks.spec.chosen // 16 * 16, 16)
    for begin in range(0, len(x_TN), most):
        part = slice(begin, begin + most)
        _group_part(x_TN[part], networks, weights, experts_TC[part], weights_TC[part], sum_TN[part])
    return sum_TN


def _group_part(
    x: Tensor, networks: ExpertNetworks, weights: ExpertWeights, experts: Tensor, shares: Tensor, out: Tensor
) -> None:
    spec, pairs = networks.spec, experts.numel()
    blocks = make_blocks(pairs, spec.count, BLOCK_M, x.device)
    sort_pairs(experts, blocks)
    inner = torch.empty(pairs, spec.inner, dtype=x.dtype, device=x.device)
    experts_up(x, weights, blocks, spec.chosen, inner, spec.activation, limit=spec.limit)
    products = torch.empty(pairs, x.shape[1], dtype=torch.float32, device=x.device)
    experts_down(inner, weights, blocks, shares, products)
    combine(products, experts, out)
