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
        """See the base class."""
        return (norms.head_norm if x.dim() == 3 else norms.rms_norm)(x, norm.weight, norm.spec)

    def add_and_norm(
        self, x_TN: Tensor, y_TN: Tensor, scale: float, after: RMSNorm | None, following: RMSNorm | None
    ) -> Tensor:
        """See the base class."""
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
        """See the base class: cosines and sines in float32, which ``rotate`` does not round."""
        return rope.rope_table(rotary.inv_freq, rotary.scale, positions)

    def rotate(self, q_THD: Tensor, k_TKD: Tensor, rotation: PassRotation) -> tuple[Tensor, Tensor]:
        """See the base class; overwrites both."""
        assert isinstance(rotation, Tensor)
        rope.rotate(q_THD, k_TKD, rotation)
        return q_THD, k_TKD

    def gate_and_mul(self, x: Tensor, activation: Activation) -> Tensor:
        """See the base class."""
        return activations.gate_and_mul(x, activation)

    def run_experts(self, x_TN: Tensor, networks: ExpertNetworks, experts_TC: Tensor, weights_TC: Tensor) -> Tensor:
        """See the base class; packed weights are multiplied expert by expert."""
        run = loop_over_experts if networks.is_packed else group_experts
        return run(x_TN, networks, experts_TC, weights_TC)

    def waits_for_experts(self, networks: ExpertNetworks) -> str | None:
        """See the base class."""
        return "experts with packed weights are looked through on the host" if networks.is_packed else None

    def enter(self, step: DeviceArrays, req_to_token: Tensor, last_tokens: Tensor) -> None:
        """See the base class: one launch. A step has each place of the table once."""
        places = (step.token_rows, step.positions, step.out_cache_loc)
        table.apply_step(req_to_token, *places, step.input_ids, last_tokens, step.last_at, step.last_rows)
