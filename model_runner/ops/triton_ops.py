"""Kernels of our own in Triton."""

from __future__ import annotations

from torch import Tensor

from ...model_files.spec import Activation
from ..batch.step_arrays import DeviceArrays
from .base import DeviceOps, PassRotation
from .expert_loop import loop_over_experts
from .grouped_experts import group_experts
from .layers.expert_networks import ExpertNetworks
from .layers.rms_norm import RMSNorm
from .layers.rotary import RotaryEmbedding
from .triton import activations, norms, rope, table


class TritonOps(DeviceOps):
    """On CUDA devices; on a CPU in Triton's interpreter."""

    def norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """Return ``x`` normalised by one kernel, a new tensor: the rows of [T, N], or each head of [T, H, D]."""
        return (norms.head_norm if x.dim() == 3 else norms.rms_norm)(x, norm.weight, norm.spec)

    def add_and_norm(
        self, x_TN: Tensor, y_TN: Tensor, scale: float, after: RMSNorm | None, following: RMSNorm | None
    ) -> Tensor:
        """Add ``scale`` times ``y`` (normalised by ``after``) to ``x`` in place, by one fused kernel.

        Return the sum normalised by ``following``, or ``x`` itself if that is None.
        """
        return norms.add_and_norm(
            x_TN,
            y_TN,
            None if following is None else following.weight,
            None if following is None else following.spec,
            x_TN if following is None else None,
            scale=scale,
            after_weight=None if after is None else after.weight,
            after_spec=None if after is None else after.spec,
        )

    def rotation(self, rotary: RotaryEmbedding, positions: Tensor) -> PassRotation:
        """Return a float32 table [T, r] of the positions' cosines, then sines, which ``rotate`` uses unrounded."""
        return rope.rope_table(rotary.inv_freq, rotary.scale, positions)

    def rotate(self, q_THD: Tensor, k_TKD: Tensor, rotation: PassRotation) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by one kernel, in place, and return the same tensors."""
        assert isinstance(rotation, Tensor)
        rope.rotate(q_THD, k_TKD, rotation)
        return q_THD, k_TKD

    def gate_and_mul(self, x: Tensor, activation: Activation) -> Tensor:
        """Return the gated activation by one kernel, as a new tensor."""
        return activations.gate_and_mul(x, activation)

    def run_experts(self, x_TN: Tensor, networks: ExpertNetworks, experts_TC: Tensor, weights_TC: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, [T, N] float32, by kernels for all experts at once.

        Experts with packed weights run one after another instead, and the host waits.
        """
        run = loop_over_experts if networks.is_packed else group_experts
        return run(x_TN, networks, experts_TC, weights_TC)

    def waits_for_experts(self, networks: ExpertNetworks) -> str | None:
        """Return a reason if an expert has packed weights, as these run one after another; None for floats."""
        return "experts with packed weights are looked through on the host" if networks.is_packed else None

    def enter(self, step: DeviceArrays, req_to_token: Tensor, last_tokens: Tensor) -> None:
        """Queue one kernel that writes newest tokens into the step's ``input_ids`` and its slots into ``req_to_token``.

        ``last_tokens``: the newest token of each row of the request table. One kernel is safe because a step writes
        each entry of the table once.
        """
        places = (step.token_rows, step.positions, step.out_cache_loc)
        table.apply_step(req_to_token, *places, step.input_ids, last_tokens, step.last_at, step.last_rows)
