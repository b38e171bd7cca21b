"""Experts one after another, each over all tokens that have chosen it: token by token it would be once for each.

How many have chosen which decides what is launched, so the host waits for the router, in every layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layers.expert_networks import ExpertNetworks


def loop_over_experts(x_TN: Tensor, networks: ExpertNetworks, experts_TC: Tensor, weights_TC: Tensor) -> Tensor:
    """Return the weighted sum of each token's chosen experts, [T, N] float32, running one expert after another.

    ``experts_TC``, ``weights_TC``: each token's experts and their weights in the sum. Weights may be floats or packed.
    The host waits for the number of tokens of each expert.
    """
    sum_TN = torch.zeros(x_TN.shape, dtype=torch.float32, device=x_TN.device)
    chosen, weights = experts_TC.flatten(), weights_TC.flatten()
    pairs = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=networks.spec.count).tolist()
    for expert, own in enumerate(torch.split(pairs, counts)):
        if len(own):
            tokens = own // networks.spec.chosen
            out = networks.forward(expert, x_TN[tokens])
            sum_TN.index_add_(0, tokens, out.float() * weights[own, None])
    return sum_TN
