"""Plain torch, on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...model_files.spec import Activation
from ..batch.step_arrays import DeviceArrays
from .base import DeviceOps, PassRotation
from .expert_loop import loop_over_experts
from .layers.expert_networks import ExpertNetworks
from .layers.rms_norm import RMSNorm
from .layers.rotary import RotaryEmbedding, Rotation
from .reference import gate_and_mul, rope


class TorchOps(DeviceOps):
    """The reference."""

    def norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """Return ``x`` normalised by ``RMSNorm.forward``: float32 arithmetic, rounded to the type of ``x``."""
        return norm.forward(x)

    def add_and_norm(
        self, x_TN: Tensor, y_TN: Tensor, scale: float, after: RMSNorm | None, following: RMSNorm | None
    ) -> Tensor:
        """Add ``scale`` times ``y`` (normalised by ``after``) to ``x`` in place, by separate operations of torch.

        Return the sum normalised by ``following``, or ``x`` itself if that is None.
        """
        x_TN.add_(y_TN if after is None else after.forward(y_TN), alpha=scale)
        return x_TN if following is None else following.forward(x_TN)

    def rotation(self, rotary: RotaryEmbedding, positions: Tensor) -> PassRotation:
        """Return cosines and sines of ``positions``, computed in float32 and rounded to the activations' type."""
        return rotary.forward(positions)

    def rotate(self, q_THD: Tensor, k_TKD: Tensor, rotation: PassRotation) -> tuple[Tensor, Tensor]:
        """Return rotated queries and keys as new tensors, computed in the activations' type."""
        assert isinstance(rotation, Rotation)
        return rope(q_THD, *rotation), rope(k_TKD, *rotation)

    def gate_and_mul(self, x: Tensor, activation: Activation) -> Tensor:
        """Return the gated activation as a new tensor; ``x`` is left as it is."""
        return gate_and_mul(x, activation)

    def run_experts(self, x_TN: Tensor, networks: ExpertNetworks, experts_TC: Tensor, weights_TC: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, [T, N] float32, by running one expert after another.

        The host waits for the number of tokens of each.
        """
        return loop_over_experts(x_TN, networks, experts_TC, weights_TC)

    def waits_for_experts(self, networks: ExpertNetworks) -> str | None:
        """Return a reason always: the loop over experts reads their token counts on the host."""
        return "without Triton's kernels, experts are looked through on the host"

    def enter(self, step: DeviceArrays, req_to_token: Tensor, last_tokens: Tensor) -> None:
        """Write newest tokens into the step's ``input_ids``, and its slots into ``req_to_token``, by torch operations.

        ``last_tokens``: the newest token of each row of the request table. ``step.last_rows`` and ``step.last_at`` say
        which of these are copied, and where to.
        """
        step.input_ids.index_copy_(0, step.last_at, last_tokens.index_select(0, step.last_rows))
        req_to_token[step.token_rows, step.positions] = step.out_cache_loc.to(torch.int32)
