"""Operations that a device does in one kernel and torch in several: one interface, chosen once a model.

Shapes: T tokens, N elements of a row, H heads, D head_dim, I inner size, R rows and C columns of the request table;
where there are experts, C chosen ones of each token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from ...model_files.spec import Activation
from ..batch.step_arrays import DeviceArrays
from .layers.expert_networks import ExpertNetworks
from .layers.rms_norm import RMSNorm
from .layers.rotary import RotaryEmbedding, Rotation

PassRotation = Rotation | Tensor
"""What a pass's tokens turn by, for the ops that made it."""


class DeviceOps(ABC):
    """The reference is ``torch_ops.py``; others differ from it by rounding."""

    @abstractmethod
    def norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """Return ``x`` [T, N] normalised by ``norm``, or [T, H, D] with each head by itself; a new tensor."""

    @abstractmethod
    def add_and_norm(
        self, x_TN: Tensor, y_TN: Tensor, scale: float, after: RMSNorm | None, following: RMSNorm | None
    ) -> Tensor:
        """Add ``scale`` times ``y`` to the residual ``x``, in place.

        ``after``: norm that ``y`` passes through before that; None: none. Returns the input of the next layer: the sum
        normalised by ``following``, or ``x`` itself if that is None.
        """

    @abstractmethod
    def rotation(self, rotary: RotaryEmbedding, positions: Tensor) -> PassRotation:
        """Return what turns the queries and keys of a pass's ``positions`` [T].

        It is computed once for a pass. Each layer then hands it to ``rotate`` of the same class, as its form differs.
        """

    @abstractmethod
    def rotate(self, q_THD: Tensor, k_TKD: Tensor, rotation: PassRotation) -> tuple[Tensor, Tensor]:
        """Rotate the queries and keys of each token by its position, and return both.

        They are new tensors, or the same ones overwritten.
        """

    @abstractmethod
    def gate_and_mul(self, x: Tensor, activation: Activation) -> Tensor:
        """Return ``activation(gate) * up`` [T, I] for ``x`` = [gate, up] [T, 2 I]. ``x`` may be overwritten."""

    @abstractmethod
    def run_experts(self, x_TN: Tensor, networks: ExpertNetworks, experts_TC: Tensor, weights_TC: Tensor) -> Tensor:
        """Return the sum of each token's chosen experts, each times its weight (float32): [T, N] float32, a new tensor.

        ``experts_TC``: their numbers, int64, distinct for a token. The sum goes in the order of the numbers.
        """

    @abstractmethod
    def waits_for_experts(self, networks: ExpertNetworks) -> str | None:
        """Return why ``run_experts`` makes the host wait for the choice of experts; None if it does not.

        Call it after loading weights.
        """

    @abstractmethod
    def enter(self, step: DeviceArrays, req_to_token: Tensor, last_tokens: Tensor) -> None:
        """Update the device's arrays before a pass; a device only queues this.

        The slots of the pass's tokens go into the request table ``req_to_token`` ([R, C] int32). The newest tokens of
        some rows are known on the device alone. They are copied from ``last_tokens`` ([R] int64, by row) into the
        step's ``input_ids``.
        """
